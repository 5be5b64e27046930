"""The table of one IP family as nft text, whole or as the difference to the kernel's."""

import sys
from collections.abc import Iterable

from kproxy_core.contract import Preview, SyncFailed, TrustLost, Update
from kproxy_core.model.address import Address, Family, Protocol, format_address
from kproxy_core.nft.messages import commands_text
from kproxy_core.nft.transaction import (
    Replacement,
    constants,
    count_changes,
    difference,
    is_quotable,
    replacement,
    unwanted,
)
from kproxy_nftables import names, skeleton
from kproxy_nftables.applied import Contents, compare
from kproxy_nftables.detect import can_own
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import TABLE
from kproxy_nftables.settings import DEFAULTS, Settings
from kproxy_nftables.skeleton import all_owned
from kproxy_nftables.wanted import Element, node_elements

_ENDPOINT_MAPS = {name for name in names.ELEMENT_CONTAINERS if name.endswith("-endpoints")}
_ADDRESS_SETS = {names.CLUSTER_IPS, names.NODE_IPS, names.HAIRPINS}
_PROTOCOLS = {protocol.value: protocol.name.lower() for protocol in Protocol}


def render_text(update: Update, settings: Settings = DEFAULTS) -> str:
    """Return the commands that bring an empty kernel to *update*."""
    node, plans = update.node, update.plans.values()
    layout = skeleton.layout(node, skeleton.templates_of(plans), all_owned(plans), settings)
    rules = commands_text(difference(skeleton.table(update.family), layout, None))
    empty: Contents = {container: {} for container in names.ELEMENT_CONTAINERS}
    _, _, adds = compare(update.plans, node_elements(node), empty)
    return rules + elements_text(update.family, adds)


def elements_text(family: Family, wanted: Iterable[Element], command: str = "add") -> str:
    """Return the commands that add *wanted* elements, or with *command* ``delete`` delete them."""
    by_container: dict[str, list[str]] = {}
    for container, key, value in wanted:
        by_container.setdefault(container, []).append(_element_text(family, container, key, value))
    return "".join(
        f"{command} element {family.ip} {TABLE} {container} {{\n    "
        + ",\n    ".join(sorted(lines))
        + "\n}\n"
        for container, lines in by_container.items()
    )


def _element_text(family: Family, container: str, key: bytes, value: bytes | str | None) -> str:
    size = family.size
    if container in _ADDRESS_SETS:
        parts = [format_address(Address(key[at : at + size])) for at in range(0, len(key), size)]
    else:
        parts = []
        if "nodeport" not in container:
            parts.append(format_address(Address(key[:size])))
            key = key[size:]
        if container in _ENDPOINT_MAPS:
            parts += [str(int.from_bytes(key[:2], "big")), str(int.from_bytes(key[4:8], sys.byteorder))]
        else:
            parts += [_PROTOCOLS.get(key[0], str(key[0])), str(int.from_bytes(key[4:6], "big"))]
    text = " . ".join(parts)
    if isinstance(value, bytes):
        address = format_address(Address(value[:size]))
        return f"{text} : {address} . {int.from_bytes(value[size : size + 2], 'big')}"
    return f"{text} : {value}" if value else text


def preview(update: Update, settings: Settings, *, may_own: bool) -> Preview:
    """Return the operations of a resync; *may_own*: see `BackendSettings.own_tables`. Raises BackendError."""
    family, node, plans = update.family, update.node, update.plans
    templates, owned = skeleton.templates_of(plans.values()), all_owned(plans.values())
    with Kernel() as kernel:
        table = skeleton.table(family, owned=may_own and can_own(kernel))
        layout = skeleton.layout(node, templates, owned, settings.limited_to(kernel.devices()))
        actual: Contents = {container: {} for container in names.ELEMENT_CONTAINERS}
        try:
            held = kernel.held(family, constants(layout))
            commands = difference(table, layout, held)
            others = unwanted(held, layout) if held else []
            if held:
                actual = {container: kernel.elements(family, container) for container in actual}
        except (Replacement, SyncFailed) as reason:
            if isinstance(reason, TrustLost) or not kernel.has_table(family, TABLE):
                raise
            commands, others, held = replacement(table, layout), [], None
    _, deletes, adds = compare(plans, node_elements(node), actual)
    keys = [(container, key, None) for container, key, _ in deletes]
    elements = elements_text(family, keys, command="delete") + elements_text(family, adds)
    foreign = sum(not names.may_be_left(item.name) for item in others)
    operations = count_changes(table, commands, held) + len(deletes) + len(adds) + foreign
    last = table.remove(item for item in others if is_quotable(item.name))
    return Preview(operations, commands_text(commands) + elements + commands_text(last))

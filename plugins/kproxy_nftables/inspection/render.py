"""The whole table of one IP family as nft text, for people and for `nft -f`."""

import sys
from collections.abc import Iterable

from kproxy_core.backend.api import Update
from kproxy_core.host.nftables.objects import commands_text, difference
from kproxy_core.model.address import Address, Family, Protocol, format_address
from kproxy_nftables import names, skeleton
from kproxy_nftables.applied import Contents, compare_all
from kproxy_nftables.names import TABLE
from kproxy_nftables.owned_chains import all_owned
from kproxy_nftables.skeleton import NO_EXTRAS, Extras
from kproxy_nftables.wanted import Element, node_elements

_ENDPOINT_MAPS = {name for name in names.ELEMENT_CONTAINERS if name.endswith("-endpoints")}
_ADDRESS_SETS = {names.CLUSTER_IPS, names.NODE_IPS, names.HAIRPINS}
_PROTOCOLS = {protocol.value: protocol.name.lower() for protocol in Protocol}


def render_text(update: Update, extras: Extras = NO_EXTRAS) -> str:
    """Return the commands that bring an empty kernel to *update*."""
    node, plans = update.node, update.plans.values()
    layout = skeleton.layout(node, skeleton.templates_of(plans), all_owned(plans), extras)
    rules = commands_text(difference(skeleton.table(update.family), layout, None))
    empty: Contents = {container: {} for container in names.ELEMENT_CONTAINERS}
    _, _, adds = compare_all(update.plans, node_elements(node), empty)
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
            parts += [_PROTOCOLS[key[0]], str(int.from_bytes(key[4:6], "big"))]
    text = " . ".join(parts)
    if isinstance(value, bytes):
        address = format_address(Address(value[:size]))
        return f"{text} : {address} . {int.from_bytes(value[size : size + 2], 'big')}"
    return f"{text} : {value}" if value else text

"""The whole table of one family as nft text, for people and for `nft -f`."""

import sys
from collections.abc import Iterable

from kproxy_core.backend.api import Update
from kproxy_core.model.address import Address, Family, Protocol, format_address
from kproxy_core.model.node import NodeView
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_nftables import names, skeleton
from kproxy_nftables.names import NFT_FAMILY, TABLE, Template
from kproxy_nftables.owned_chains import owned_objects
from kproxy_nftables.wanted import Element, elements, node_elements, shared_elements, verdicts

_ENDPOINT_MAPS = {name for name in names.ELEMENT_CONTAINERS if name.endswith("-endpoints")}
_ADDRESS_SETS = {names.CLUSTER_IPS, names.NODE_IPS, names.HAIRPINS}
_PROTOCOLS = {protocol.value: protocol.name.lower() for protocol in Protocol}


def render_text(update: Update) -> str:
    """What a full update makes of an empty kernel."""
    plans = list(update.plans.values())
    wanted = [element for plan in plans for element in elements(plan, plan.cluster, plan.local)]
    wanted += dict.fromkeys(element for plan in plans for element in shared_elements(plan))
    wanted += node_elements(update.node)
    templates = used_templates(verdict for plan in plans for verdict in verdicts(plan))
    return rules_text(update.node, templates, plans) + elements_text(update.family, wanted)


def rules_text(node: NodeView, templates: Iterable[Template], plans: Iterable[ServicePlan]) -> str:
    """Everything but elements: the skeleton, template chains and what service ports own."""
    owned = [text for plan in plans for text in owned_objects(plan).values()]
    return (
        skeleton.skeleton(node)
        + skeleton.templates(node, templates)
        + skeleton.service_cidrs(node)
        + "".join(owned)
    )


def used_templates(verdicts: Iterable[str]) -> set[Template]:
    """The templates that *verdicts* lead to."""
    found = (names.parse_template(verdict.partition(" ")[2]) for verdict in set(verdicts))
    return {template for template in found if template is not None}


def elements_text(family: Family, wanted: Iterable[Element]) -> str:
    """Commands that add *wanted* elements."""
    by_container: dict[str, list[str]] = {}
    for container, key, value in wanted:
        by_container.setdefault(container, []).append(_element_text(family, container, key, value))
    return "".join(
        f"add element {NFT_FAMILY[family]} {TABLE} {container} {{\n    "
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

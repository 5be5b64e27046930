"""The table of one IP family as nft text, whole or as the difference to the kernel's."""

from collections.abc import Iterable

from kproxy_core.contract import Family, Preview, SyncFailed, TrustLost, Update
from kproxy_core.linux.rulesets import marker_changes, marker_creation
from kproxy_core.nft.elements import Element, PlainElement, element_texts
from kproxy_core.nft.messages import commands_text
from kproxy_core.nft.objects import Container, Layout
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
from kproxy_nftables.wanted import node_elements


def render_text(update: Update, settings: Settings = DEFAULTS) -> str:
    """Return the commands that bring an empty kernel to *update*."""
    node, plans = update.node, update.plans.values()
    layout = skeleton.layout(node, skeleton.templates_of(plans), all_owned(plans), settings)
    rules = commands_text(difference(skeleton.table(update.family), layout, None))
    empty: Contents = {container: {} for container in names.ELEMENT_CONTAINERS}
    _, _, adds = compare(update.plans, node_elements(node), empty)
    marker = commands_text(marker_creation(update.family)) if settings.marked else ""
    return rules + elements_text(update.family, layout, adds) + marker


def elements_text(
    family: Family, layout: Layout, wanted: Iterable[PlainElement], command: str = "add"
) -> str:
    """Return the commands that add *wanted* elements, or with *command* ``delete`` delete them."""
    by_container: dict[str, list[Element]] = {}
    for name, key, data in wanted:
        by_container.setdefault(name, []).append(Element(key, data))
    found = []
    for name, elements in by_container.items():
        container = layout[name]
        assert isinstance(container, Container)
        shown = ",\n    ".join(sorted(element_texts(container.key, container.value, elements)))
        found.append(f"{command} element {family.ip} {TABLE} {name} {{\n    {shown}\n}}\n")
    return "".join(found)


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
    elements = elements_text(family, layout, keys, "delete") + elements_text(family, layout, adds)
    foreign = sum(not names.may_be_left(item.name) for item in others)
    operations = count_changes(table, commands, held) + len(deletes) + len(adds) + foreign
    last = [*table.remove(item for item in others if is_quotable(item.name)),
            *marker_changes(family, wanted=settings.marked)]
    return Preview(operations, commands_text(commands) + elements + commands_text(last))

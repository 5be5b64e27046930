"""Serves the hook `kproxy_preview`: the difference between the table and the plans, as nft commands."""

from kproxy_core.backend.api import Preview, Update
from kproxy_core.host.nftables.objects import (
    Replacement,
    commands_text,
    constants,
    count_changes,
    difference,
    is_quotable,
    replacement,
    unwanted,
)
from kproxy_nftables import names, skeleton
from kproxy_nftables.applied import Contents, compare_all
from kproxy_nftables.inspection.render import elements_text
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.owned_chains import all_owned
from kproxy_nftables.questions.features import can_own
from kproxy_nftables.skeleton import Extras
from kproxy_nftables.wanted import node_elements


def preview(update: Update, extras: Extras, *, may_own: bool) -> Preview:
    """Return the operations of a resync; *may_own*: see `BackendSettings.own_tables`. Raises BackendError."""
    family, node, plans = update.family, update.node, update.plans
    templates, owned = skeleton.templates_of(plans.values()), all_owned(plans.values())
    with Kernel() as kernel:
        table = skeleton.table(family, owned=may_own and can_own(kernel))
        layout = skeleton.layout(node, templates, owned, extras.limited_to(kernel.devices()))
        held = kernel.held(family, constants(layout))
        try:
            commands = difference(table, layout, held)
            others = unwanted(held, layout) if held else []
        except Replacement:
            commands, others = replacement(table, layout), []
            held = None
        actual: Contents = {
            container: kernel.elements(family, container) if held else {}
            for container in names.ELEMENT_CONTAINERS
        }
    _, deletes, adds = compare_all(plans, node_elements(node), actual)
    keys = [(container, key, None) for container, key, _ in deletes]
    elements = elements_text(family, keys, command="delete") + elements_text(family, adds)
    operations = count_changes(table, commands) + len(deletes) + len(adds)
    last = table.remove(item for item in others if is_quotable(item.name))
    return Preview(operations, commands_text(commands) + elements + commands_text(last))

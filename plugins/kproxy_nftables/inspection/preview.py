"""Serves the hook `kproxy_preview`: the difference between the table and the plans, as nft commands."""

from collections.abc import Mapping, Sequence

from kproxy_core.backend.api import Preview, Update
from kproxy_nftables import names, skeleton
from kproxy_nftables.applied import Contents, compare_all
from kproxy_nftables.inspection.explain import listed_rules, written_rules
from kproxy_nftables.inspection.render import elements_text
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.owned_chains import all_owned
from kproxy_nftables.skeleton import Extras
from kproxy_nftables.wanted import node_elements

_Rules = Mapping[str, Sequence[str]]


def preview(update: Update, extras: Extras) -> Preview:
    """Return the operations of a resync. Raises BackendError."""
    family, node, plans = update.family, update.node, update.plans
    templates, owned = skeleton.templates_of(plans.values()), all_owned(plans.values())
    with Kernel() as kernel:
        extras = extras.limited_to(kernel.devices())
        wanted = skeleton.object_names(templates, owned, extras)
        actual: Contents = {
            container: kernel.elements(family, container) for container in names.ELEMENT_CONTAINERS}
        held = listed_rules(kernel.rules_text(family).splitlines())
        unwanted = kernel.unwanted(family, wanted)
    _, deletes, adds = compare_all(plans, node_elements(node), actual)
    rules = skeleton.rules_text(node, templates, owned, extras)
    parts = ["" if _holds(held, written_rules(rules.splitlines())) else rules]
    keys = [(container, key, None) for container, key, _ in deletes]
    parts += [elements_text(family, keys, command="delete"), elements_text(family, adds)]
    return Preview(len(deletes) + len(adds), "".join([*parts, skeleton.delete_foreign(family, *unwanted)]))


def _holds(held: _Rules, wanted: _Rules) -> bool:
    """Return whether the kernel holds the constant rules: nft prints them in other words, but as many."""
    return bool(held) and all(len(held.get(chain, ())) == len(rules) for chain, rules in wanted.items())

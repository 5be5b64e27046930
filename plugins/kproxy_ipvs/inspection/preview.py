"""Serves the hook `kproxy_preview`: the difference between the kernel and the plans, as text."""

from kproxy_core.backend.api import Preview, Update
from kproxy_ipvs import skeleton
from kproxy_ipvs.applied import Applied, compare_all, foreign_servers
from kproxy_ipvs.batch import rules
from kproxy_ipvs.inspection.render import difference_text
from kproxy_ipvs.kernel import device, sets
from kproxy_ipvs.kernel.virtual_servers import VirtualServers
from kproxy_ipvs.names import SETS
from kproxy_ipvs.settings import Settings
from kproxy_ipvs.wanted import make_style
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_variant


def preview(update: Update, settings: Settings) -> Preview:
    """Return the operations of a resync. Raises HostError, or NoVariant without iptables."""
    family, node = update.family, update.node
    entries = sets.read(family)
    missing = [kind for kind in SETS if kind not in entries]
    on_device, elsewhere = device.read(family)
    expected = Applied.after(update.plans, make_style(node, settings.scheduler, elsewhere))
    with VirtualServers() as servers:
        held = servers.read(family)
    foreign = foreign_servers(held, on_device, entries, settings.exclude_cidrs, node.masquerade_bit)
    difference = compare_all(expected, held, entries, on_device, foreign)
    text = rules.difference(Tables(family, find_variant()).chains(), skeleton.skeleton(node))
    no_device = not device.exists()
    operations = difference.operations + len(missing) + no_device + text.count("\n-") + text.count("\n:")
    return Preview(operations, difference_text(family, difference, missing, text, no_device=no_device))


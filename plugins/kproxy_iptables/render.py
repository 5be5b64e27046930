"""All rules of one family as input for iptables-restore, whole or as the difference to the kernel's."""

import sys

from kproxy_core.contract import Preview, Update
from kproxy_iptables import batch, kernel
from kproxy_iptables.applied import FullDifference, Observed
from kproxy_iptables.kernel import read_facts, read_packets
from kproxy_iptables.names import COUNTERS
from kproxy_iptables.settings import Settings
from kproxy_iptables.skeleton import Facts, serves_loopback
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_variant


def render_text(update: Update, settings: Settings) -> str:
    """Return the rules of a resync in an empty kernel without accounting objects."""
    localhost = serves_loopback(update.node, enabled=settings.localhost_node_ports)
    facts = Facts(localhost_node_ports=localhost)
    return difference_text(FullDifference(Observed(), update.plans, update.node, facts))


def difference_text(difference: FullDifference) -> str:
    """Return the input for iptables-restore that removes the differences, except stale chains."""
    return "".join(batch.inputs(difference.chains(), difference.references, chains_per_call=sys.maxsize))


def preview(update: Update, settings: Settings) -> Preview:
    """Return what a resync would write, without the counters that it would create.

    Raises HostError, or NoVariant without iptables.
    """
    localhost = serves_loopback(update.node, enabled=settings.localhost_node_ports)
    counters = frozenset(name for name in COUNTERS if read_packets(name) is not None)
    facts = read_facts(counters, localhost_node_ports=localhost)
    observed = kernel.read(Tables(update.family, find_variant()))
    difference = FullDifference(observed, update.plans, update.node, facts)
    text = difference_text(difference) + "".join(batch.deletions(difference.stale, sys.maxsize))
    return Preview(difference.operations, text)

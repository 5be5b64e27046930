"""Serves the hook `kproxy_preview`: the difference between the tables and the plans, for iptables-restore."""

import sys

from kproxy_core.backend.api import Preview, Update
from kproxy_iptables import batch
from kproxy_iptables.applied import Comparison
from kproxy_iptables.inspection.render import comparison_text
from kproxy_iptables.kernel import rules
from kproxy_iptables.kernel.accounting import read_packets
from kproxy_iptables.kernel.requirements import read_facts
from kproxy_iptables.names import COUNTERS
from kproxy_iptables.skeleton import serves_loopback
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_variant


def preview(update: Update, *, localhost_node_ports: bool) -> Preview:
    """Return what a resync would write, without the counters that it would create.

    Raises HostError, or NoVariant without iptables.
    """
    localhost = serves_loopback(update.node, enabled=localhost_node_ports)
    counters = frozenset(name for name in COUNTERS if read_packets(name) is not None)
    facts = read_facts(counters, localhost_node_ports=localhost)
    observed = rules.read(Tables(update.family, find_variant()))
    comparison = Comparison(observed, update.plans, update.node, facts)
    text = comparison_text(comparison) + "".join(batch.deletions(comparison.stale, sys.maxsize))
    return Preview(comparison.operations, text)

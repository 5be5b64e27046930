"""Serves the hook `kproxy_render`: all rules of one family as input for iptables-restore."""

import sys

from kproxy_core.backend.api import Update
from kproxy_iptables import batch
from kproxy_iptables.applied import Comparison, Observed
from kproxy_iptables.skeleton import Facts, serves_loopback


def render_text(update: Update, *, localhost_node_ports: bool) -> str:
    """Return the rules of a resync in an empty kernel without accounting objects."""
    localhost = serves_loopback(update.node, enabled=localhost_node_ports)
    facts = Facts(localhost_node_ports=localhost)
    return comparison_text(Comparison(Observed(), update.plans, update.node, facts))


def comparison_text(comparison: Comparison) -> str:
    """Return the input for iptables-restore that removes the differences, without stale chains."""
    return "".join(batch.inputs(comparison.chains(), comparison.references, chains_per_call=sys.maxsize))

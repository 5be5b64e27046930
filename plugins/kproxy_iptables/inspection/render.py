"""The hook `kproxy_render`: all rules of one family as input for iptables-restore, for people to read."""

from kproxy_core.backend.api import Update
from kproxy_iptables import batch
from kproxy_iptables.applied import Comparison, Observed, count_endpoints
from kproxy_iptables.skeleton import Facts, serves_loopback
from kproxy_iptables.wanted import make_style


def render_text(update: Update, *, localhost_node_ports: bool) -> str:
    """Return the rules of a resync in an empty kernel without accounting objects."""
    node = update.node
    facts = Facts(localhost_node_ports=serves_loopback(node, enabled=localhost_node_ports))
    style = make_style(node, facts, count_endpoints(update.plans))
    comparison = Comparison(Observed(), update.plans, node, style, facts)
    return "".join(
        batch.inputs(
            comparison.chains(),
            comparison.references,
            mark_masq=comparison.mark_masq(),
            chains_per_call=1_000_000_000,
        )
    )

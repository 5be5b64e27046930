"""All rules of one family as input for iptables-restore, for people and for the program."""

from kproxy_core.backend.api import Update
from kproxy_core.model.address import Family
from kproxy_iptables import batch
from kproxy_iptables.applied import Comparison, Observed, count_endpoints
from kproxy_iptables.skeleton import Facts
from kproxy_iptables.wanted import LARGE_CLUSTER, make_style


def render_text(update: Update, *, localhost: bool) -> str:
    """What a full update makes of an empty kernel that has all features but accounting objects."""
    facts = Facts(
        localhost_node_ports=localhost
        and update.family is Family.IPV4
        and update.node.node_ports_on_loopback
    )
    comments = count_endpoints(update.plans) <= LARGE_CLUSTER
    style = make_style(update.node, localhost_counted=False, comments=comments)
    comparison = Comparison(Observed(), update.plans, update.node, style, facts)
    return "".join(
        batch.calls(
            comparison.chains(),
            comparison.references,
            mark_masq=comparison.mark_masq(),
            chains_per_call=1_000_000_000,
        )
    )

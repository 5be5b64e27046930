"""Serves the hook `kproxy_preview`: the difference between the tables and the plans, for iptables-restore."""

from kproxy_core.backend.api import Preview, Update
from kproxy_core.host import sysctl
from kproxy_core.host.errors import HostError
from kproxy_iptables import batch
from kproxy_iptables.applied import Comparison, count_endpoints
from kproxy_iptables.kernel import rules
from kproxy_iptables.kernel.accounting import read_packets
from kproxy_iptables.names import COUNTERS
from kproxy_iptables.skeleton import Facts, serves_loopback
from kproxy_iptables.wanted import make_style
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_variant

_ONE_CALL = 1_000_000_000


def preview(update: Update, *, localhost_node_ports: bool) -> Preview:
    """Return what a resync would write. Raises HostError, or NoVariant without iptables."""
    node, plans = update.node, update.plans
    facts = _facts(localhost_node_ports=serves_loopback(node, enabled=localhost_node_ports))
    style = make_style(node, facts, count_endpoints(plans))
    observed = rules.read(Tables(update.family, find_variant()))
    comparison = Comparison(observed, plans, node, style, facts)
    inputs = list(batch.inputs(
        comparison.chains(), comparison.references,
        mark_masq=comparison.mark_masq(), chains_per_call=_ONE_CALL,
    ))  # fmt: skip
    inputs += batch.deletions(comparison.stale, _ONE_CALL)
    return Preview(comparison.operations, "".join(inputs))


def _facts(*, localhost_node_ports: bool) -> Facts:
    """Read the kernel's settings. Counters that a sync would create are left out."""
    try:
        liberal = sysctl.read("net/netfilter/nf_conntrack_tcp_be_liberal") != "0"
    except HostError:
        liberal = False
    counters = frozenset(name for name in COUNTERS if read_packets(name) is not None)
    return Facts(liberal=liberal, counters=counters, localhost_node_ports=localhost_node_ports)

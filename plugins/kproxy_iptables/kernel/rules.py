"""What of the kernel's tables matters to this mode."""

from collections.abc import Iterable

from kproxy_iptables import names
from kproxy_iptables.applied import Observed, fingerprint
from kproxy_xtables.tables import SavedChain


def observe(chains: Iterable[SavedChain]) -> Observed:
    """Keep fingerprints of service ports' chains, and of foreign ones the rules that jump to Kubernetes'."""
    observed = Observed()
    for saved in chains:
        table, chain, lines = saved
        if names.is_service_chain(table, chain):
            observed.service_chains[chain] = fingerprint("".join(lines))
        elif names.is_ours(table, chain) or chain == names.KUBELET_FIREWALL:
            observed.chains[table, chain] = saved.rules
        else:
            jumps = [line for line in lines if "-j KUBE-" in line]
            observed.chains[table, chain] = saved._replace(lines=jumps).rules
    return observed

"""Reading of the tables, reduced to the chains and rules that matter to this mode."""

from kproxy_iptables import names
from kproxy_iptables.applied import Observed, fingerprint
from kproxy_xtables.tables import Tables


def read(tables: Tables) -> Observed:
    """Read all tables of one family. Raises HostError."""
    observed = Observed()
    for saved in tables.save():
        table, chain, lines = saved
        if names.is_service_chain(table, chain):
            observed.service_chains[chain] = fingerprint("".join(lines))
        elif names.is_ours(table, chain) or chain == names.KUBELET_FIREWALL:
            observed.chains[table, chain] = saved.rules
        else:
            jumps = [line for line in lines if "-j KUBE-" in line]
            observed.chains[table, chain] = saved._replace(lines=jumps).rules
    return observed

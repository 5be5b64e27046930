"""Reads what iptables-save prints."""

from collections.abc import Iterable

from kproxy_iptables import names
from kproxy_iptables.applied import Observed, fingerprint


def read(lines: Iterable[str]) -> Observed:
    """The part of *lines* that matters to this mode.

    Of chains that are not this mode's, only rules that jump to a chain of Kubernetes are kept.
    """
    observed = Observed()
    table = current = ""
    body: list[str] = []
    for line in lines:
        if line.startswith("-A "):
            chain = line[3 : line.index(" ", 3)]
            if chain != current:
                _finish(observed, current, body)
                current, body = chain, []
            if chain.startswith(names.SERVICE_PREFIXES):
                body.append(line)
            elif names.is_ours(table, chain) or chain == names.KUBELET_FIREWALL or "-j KUBE-" in line:
                # libxt_nfacct prints one blank too many.
                rule = line[len(chain) + 4 : -1].replace("--nfacct-name  ", "--nfacct-name ")
                observed.chains.setdefault((table, chain), []).append(rule)
        elif line.startswith(":"):
            chain = line[1 : line.index(" ")]
            if chain.startswith(names.SERVICE_PREFIXES):
                if table == names.NAT:
                    observed.service_chains[chain] = fingerprint("")
            else:
                observed.chains[table, chain] = []
        elif line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith("COMMIT"):
            _finish(observed, current, body)
            current, body = "", []
    return observed


def _finish(observed: Observed, chain: str, body: list[str]) -> None:
    if body and chain in observed.service_chains:
        observed.service_chains[chain] = fingerprint("".join(body))

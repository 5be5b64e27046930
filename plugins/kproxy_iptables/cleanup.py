"""Removing every trace of the mode: our chains and rules, which are kube-proxy's as well."""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy_core.backend.api import Leftovers
from kproxy_core.host.errors import HostError
from kproxy_core.host.iptables import Tables
from kproxy_core.host.iptables_variant import find_variants
from kproxy_core.model.address import Family
from kproxy_iptables import batch, names
from kproxy_iptables.applied import Observed
from kproxy_iptables.batch import Section
from kproxy_iptables.names import FILTER, MANGLE, NAT
from kproxy_iptables.saved import observe
from kproxy_iptables.skeleton import JUMPS, ChainKey

_SHARED_WITH_IPVS = {
    (NAT, names.SERVICES), (NAT, names.POSTROUTING), (NAT, names.MARK_MASQ),
    (FILTER, names.FORWARD), (FILTER, names.PROXY_FIREWALL),
}  # fmt: skip
"""Chains that kube-proxy's ipvs mode has under the same names."""

class Removal(NamedTuple):
    """What has to go from the tables of one family."""

    jumps: dict[ChainKey, list[str]]
    """Rules by the built-in chain that they are in."""
    chains: list[ChainKey]
    service_chains: list[str]
    kept: list[str]
    """Chains of ours that somebody else's rules lead to, with the reason."""


def cleanup(*, dry_run: bool) -> Leftovers:
    """Remove what is there from both interfaces of the kernel, nf_tables and legacy, and both families."""
    removed: list[str] = []
    errors: list[str] = []
    for variant in find_variants():
        for family in Family:
            tables = Tables(family, variant)
            try:
                removal = what_to_remove(observe(tables.save()))
            except HostError as error:
                if not tables.missing():
                    errors.append(f"{tables.program}: {error}")
                continue
            try:
                if not dry_run:
                    for text in inputs(removal, tables.chains_per_call):
                        tables.restore(text)
            except HostError as error:
                errors.append(f"{tables.program}: {error}")
                continue
            removed += [f"{tables.program}: {line}" for line in described(removal)]
            errors += [f"{tables.program}: {reason}" for reason in removal.kept]
    return Leftovers("iptables", tuple(removed), tuple(errors))


def what_to_remove(observed: Observed) -> Removal:
    """Decide what of *observed* is this mode's."""
    spared = _SHARED_WITH_IPVS if _ipvs_rules(observed) else set()
    jumps: dict[ChainKey, list[str]] = {}
    for table, chain, spec, target in JUMPS:
        held = observed.chains.get((table, chain), ())
        # The firewall's jumps are told apart by their comments, the others' are the same in both modes.
        if (table, target) not in spared or target == names.PROXY_FIREWALL:
            jumps.setdefault((table, chain), []).extend(rule for rule in held if rule == spec)
    chains = [key for key in sorted(names.OUR_CHAINS - spared) if key in observed.chains]
    kept: list[str] = []
    for key in list(chains):
        user = _foreign_user(observed, key, jumps)
        if user:
            chains.remove(key)
            kept.append(f"chain {key[1]} of table {key[0]} stays: a rule in {user} leads to it")
    return Removal({k: v for k, v in jumps.items() if v}, chains, list(observed.service_chains), kept)


def inputs(removal: Removal, chains_per_call: int) -> Iterator[str]:
    """The inputs for iptables-restore: jumps and what leads to others go first."""
    last = (NAT, names.MARK_MASQ)
    text = ""
    for table in (FILTER, NAT, MANGLE):
        lines = [
            f"-D {chain} {rule}"
            for (of, chain), rules in removal.jumps.items() if of == table
            for rule in rules
        ]  # fmt: skip
        chains = [chain for of, chain in removal.chains if of == table and (of, chain) != last]
        text += Section(lines=lines).text(table, stale=chains)
    if text:
        yield text
    yield from batch.deletions(removal.service_chains, chains_per_call)
    if last in removal.chains:
        yield Section().text(NAT, stale=[names.MARK_MASQ])


def described(removal: Removal) -> Iterator[str]:
    """One line for each object; chains of service ports are counted by kind."""
    for (table, chain), rules in removal.jumps.items():
        for rule in rules:
            yield f"rule in {chain} of table {table}: {rule}"
    for table, chain in removal.chains:
        yield f"chain {chain} of table {table}"
    for prefix in names.SERVICE_PREFIXES:
        if count := sum(chain.startswith(prefix) for chain in removal.service_chains):
            yield f"{count} chains {prefix}* of table {NAT}"


def _ipvs_rules(observed: Observed) -> bool:
    """Whether the services chain is that of the ipvs mode, which finds its addresses in ipsets."""
    return any("--match-set KUBE-" in rule for rule in observed.chains.get((NAT, names.SERVICES), ()))


def _foreign_user(observed: Observed, key: ChainKey, jumps: dict[ChainKey, list[str]]) -> str:
    """A chain of somebody else with a rule that leads to *key*; "" if there is none."""
    table, target = key
    for (of, chain), rules in observed.chains.items():
        if of == table and not names.is_ours(of, chain):
            gone = jumps.get((of, chain), ())
            if any(rule.endswith((f"-j {target}", f"-g {target}")) and rule not in gone for rule in rules):
                return chain
    return ""

"""Decisions about which chains and virtual servers in a kernel belong to the mode. Pure."""

import re
from collections.abc import Collection, Iterable
from functools import partial

from kproxy_core.model.address import Address, Cidr
from kproxy_ipvs import names
from kproxy_ipvs.applied import Entries, is_owned
from kproxy_ipvs.names import FILTER, MANGLE, NAT
from kproxy_ipvs.skeleton import JUMPS
from kproxy_ipvs.wanted import ServerKey
from kproxy_xtables.removal import Removal, plan_removal
from kproxy_xtables.rules import ChainKey, RulesByChain, parse_jump
from kproxy_xtables.shared_chains import FIREWALL, ipset_mode_chains, is_ipset_firewall_jump

_OF_BOTH = frozenset({
    (FILTER, names.NODE_PORT), (FILTER, names.IPVS_FILTER),
    (NAT, names.NODE_PORT), (NAT, names.LOAD_BALANCER),
})  # fmt: skip
"""Chains of both kube-proxy and this program."""
_KUBE_PROXYS = frozenset({(FILTER, names.SOURCE_RANGES), (FILTER, "KUBE-IPVS-OUT-FILTER")})
_OLDER = frozenset({(NAT, "KUBE-FIRE-WALL"), (NAT, "KUBE-MARK-DROP")})
"""Chains of kube-proxy up to 1.24 and up to 1.27. kubelet has the second as well, and recreates it."""

_NEVER_KUBE_PROXYS = frozenset({
    (MANGLE, names.IPVS_ACCESS), (MANGLE, names.SOURCE_RANGES), (MANGLE, names.SHORT_CIRCUITS),
})  # fmt: skip

_CHAIN_OF_IPTABLES = re.compile("KUBE-(?:NODEPORTS|(?:SVC|SVL|SEP|FW|EXT|XLB)-[A-Z2-7]{16})")
"""Chains of the iptables mode that jump to shared ones."""


def is_leftover(
    key: ServerKey, on_device: Collection[Address], entries: Entries, excluded: Iterable[Cidr]
) -> bool:
    """Return whether a virtual server is this mode's. Its mark must be in the set of short circuits."""
    marks = entries.get(names.SHORT_CIRCUIT, {}).values()
    return is_owned(key, on_device, entries, excluded, lambda mark: mark in marks)


def plan_cleanup(held: RulesByChain, kept: frozenset[ChainKey] = frozenset()) -> Removal:
    """Select all chains and rules of this mode, except the chains *kept*.

    Shared chains that the iptables mode has taken over are not selected.
    """
    ours = (_OF_BOTH | _KUBE_PROXYS | _OLDER | _NEVER_KUBE_PROXYS | ipset_mode_chains(held)) - kept
    return plan_removal(held, ours, partial(_is_own, ours), _is_of_iptables)


def plan_kube_proxy_cleanup(held: RulesByChain) -> Removal:
    """Select the chains and rules of kube-proxy's ipvs mode that this program does not use."""
    ours = _KUBE_PROXYS | _OLDER | (ipset_mode_chains(held) & {FIREWALL})
    targets = ours | _OF_BOTH | ipset_mode_chains(held)
    current = {(jump.table, jump.chain, jump.spec) for jump in JUMPS}

    def is_own(key: ChainKey, rule: str) -> bool:
        return _is_own(targets, key, rule) and (*key, rule) not in current

    return plan_removal(held, ours, is_own, _is_of_iptables)


def plan_own_cleanup(held: RulesByChain) -> Removal:
    """Select the chains and rules that kube-proxy never has."""
    return plan_removal(held, _NEVER_KUBE_PROXYS, partial(_jumps_to, _NEVER_KUBE_PROXYS), _is_of_iptables)


def _is_own(ours: Collection[ChainKey], key: ChainKey, rule: str) -> bool:
    return _jumps_to(ours, key, rule) or is_ipset_firewall_jump(key, rule)


def _jumps_to(chains: Collection[ChainKey], key: ChainKey, rule: str) -> bool:
    jump = parse_jump(key, rule)
    return jump is not None and jump.target_key in chains and jump.comment.startswith("kube")


def _is_of_iptables(key: ChainKey) -> bool:
    return key[0] == NAT and _CHAIN_OF_IPTABLES.fullmatch(key[1]) is not None

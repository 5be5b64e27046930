"""Decisions about which chains to delete: those of kube-proxy's userspace mode, which are also ours. Pure."""

from kproxy_userspace import names
from kproxy_userspace.skeleton import JUMPS, PIN
from kproxy_xtables.removal import Removal, plan_removal
from kproxy_xtables.rules import ChainKey, RulesByChain, parse_jump

_JUMPS = frozenset((jump.target_key, jump.chain, jump.comment) for jump in JUMPS)
_HOST_CHAINS = (("nat", names.PORTALS_HOST), ("nat", names.NODE_PORT_HOST))


def plan_cleanup(held: RulesByChain) -> Removal:
    return plan_removal(held, names.OUR_CHAINS, _is_own, lambda key: False)


def plan_own_cleanup(held: RulesByChain) -> Removal:
    """Delete all chains of the mode, but only if kproxy has written them.

    kproxy uses REDIRECT for the node's own traffic, kube-proxy DNAT. With a bind address kproxy uses DNAT
    too. Then the owner is unknown, and the chains are kept.
    """
    redirects = any("-j REDIRECT" in rule for key in _HOST_CHAINS for rule in held.get(key, ()))
    is_pinned = PIN in held.get(("filter", names.NON_LOCAL), ())
    return plan_cleanup(held if redirects or is_pinned else {})


def _is_own(key: ChainKey, rule: str) -> bool:
    jump = parse_jump(key, rule)
    return jump is not None and (jump.target_key, jump.chain, jump.comment) in _JUMPS

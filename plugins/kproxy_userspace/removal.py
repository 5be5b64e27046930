"""Which chains in a kernel are the mode's: those of kube-proxy's userspace mode, which are ours, too."""

from kproxy_userspace import names
from kproxy_userspace.batch import JUMPS, PORTAL_CHAINS, is_pin
from kproxy_xtables.removal import Removal, plan_removal
from kproxy_xtables.rules import ChainKey, RulesByChain, parse_jump

_CHAINS = frozenset([*(("nat", chain) for chain in PORTAL_CHAINS), ("filter", names.NON_LOCAL)])
_JUMPS = frozenset((jump.table, jump.chain, jump.target, jump.comment) for jump in JUMPS)
_HOSTS = (("nat", names.PORTALS_HOST), ("nat", names.NODE_PORT_HOST))


def what_to_remove(held: RulesByChain) -> Removal:
    """Decide what of *held* is this mode's."""
    return plan_removal(held, _CHAINS, _is_own, lambda key: False)


def what_is_not_kube_proxys(held: RulesByChain) -> Removal:
    """The same if our redirections are there, or what they leave: kube-proxy sends the node's own traffic to
    an address.

    Where relays listen at one address ours does so, too: those rules can't be told apart, and stay.
    """
    ours = any("-j REDIRECT" in rule for key in _HOSTS for rule in held.get(key, ()))
    left = any(map(is_pin, held.get(("filter", names.NON_LOCAL), ())))
    return what_to_remove(held if ours or left else {})


def _is_own(key: ChainKey, rule: str) -> bool:
    found = parse_jump(key, rule)
    return found is not None and (*key, found.target, found.comment) in _JUMPS

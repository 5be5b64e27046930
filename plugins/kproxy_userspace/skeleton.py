"""Constant rules (jumps, the pin, the nftables table), and decisions about which chains to delete. Pure."""

from kproxy_core.contract import Address, Family, Protocol
from kproxy_core.nft.objects import Chain, Container, Hook, Layout, Object, Table
from kproxy_core.nft.rules import (
    ADDRESS,
    DESTINATION_PORT,
    L4_PROTOCOL,
    PORT,
    PROTOCOL,
    Key,
    Rule,
    Statement,
    destination_address,
    dnat_to_port,
    equals,
    is_local,
    jump,
    redirect_to_port,
    source_address,
)
from kproxy_userspace import names
from kproxy_userspace.names import TABLE
from kproxy_xtables.removal import Removal, plan_removal
from kproxy_xtables.rules import TO_THIS_NODE, ChainKey, Jump, RulesByChain, parse_jump

_FIRST = "handle ClusterIPs; NOTE: this must be before the NodePort rules"
_LAST = "handle service NodePorts; NOTE: this must be the last rule in the chain"
_FILTER = "Ensure that non-local NodePort traffic can flow"
JUMPS = (
    Jump("nat", "PREROUTING", names.PORTALS_CONTAINER, _FIRST),
    Jump("nat", "OUTPUT", names.PORTALS_HOST, _FIRST),
    Jump("nat", "PREROUTING", names.NODE_PORT_CONTAINER, _LAST, TO_THIS_NODE, at_end=True),
    Jump("nat", "OUTPUT", names.NODE_PORT_HOST, _LAST, TO_THIS_NODE, at_end=True),
    Jump("filter", "INPUT", names.NON_LOCAL, _FILTER),
)

PIN = '-m comment --comment "kproxy: established connections stay translated" -m conntrack --ctstate NEW'
"""A rule without effect that needs connection tracking.

When the last such rule of a family is deleted, the kernel stops translating established connections.
"""

VIPS, RANGED_VIPS, NODE_PORTS = "vips", "ranged-vips", "node-ports"
_PORTALS = "portals"


def nft_table(family: Family) -> Table:
    return Table(family, TABLE, "VIPs and node ports lead to the relays of kproxy")


def nft_maps(family: Family) -> tuple[Container, Container, Container]:
    """Return the maps from portals to ports of relays."""
    port = (PROTOCOL, PORT)
    address = ADDRESS[family]
    return (
        Container(VIPS, (address, *port), (PORT,)),
        Container(RANGED_VIPS, (address, address, *port), (PORT,), interval=True),
        Container(NODE_PORTS, port, (PORT,)),
    )


def nft_layout(family: Family, at: Address | None = None) -> Layout:
    """Return the objects of the table, for relays *at* an address or everywhere."""
    daddr = destination_address(family)
    port = (L4_PROTOCOL, DESTINATION_PORT)
    portals: list[Rule] = []
    for before, key, container in (
        ((), (daddr, *port), VIPS),
        ((), (source_address(family), daddr, *port), RANGED_VIPS),
        ((is_local("daddr"),), port, NODE_PORTS),
    ):
        portals += [
            (*before, equals(L4_PROTOCOL, protocol), _to_relay(at, key, container))
            for protocol in (Protocol.TCP, Protocol.UDP)
        ]
    to_portals: Rule = (jump(_PORTALS),)
    objects: list[Object] = [
        *nft_maps(family), Chain(_PORTALS, tuple(portals)),
        *(Chain(f"nat-{hook}", (to_portals,), Hook("nat", hook, -100)) for hook in ("prerouting", "output")),
    ]
    return {item.name: item for item in objects}


def _to_relay(at: Address | None, key: Key, container: str) -> Statement:
    """Translate the destination to the relay that *container* has for *key*."""
    return redirect_to_port(key, container) if at is None else dnat_to_port(at, key, container)


# Chains to delete: those of kube-proxy's userspace mode, which are also ours.

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

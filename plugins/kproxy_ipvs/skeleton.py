"""The constant iptables rules, as iptables-save prints them. They do not depend on Services. Pure."""

from kproxy_core.contract import Family, LocalSource, NodeView
from kproxy_ipvs import names
from kproxy_ipvs.names import FILTER, MANGLE, NAT, SetKind
from kproxy_xtables.rules import NEW_CONNECTIONS, REJECT, ChainKey, Jump, from_pods, mark_rules

JUMPS = (
    # mangle precedes nat, and IPVS in both directions.
    Jump(MANGLE, "PREROUTING", names.IPVS_ACCESS, "kubernetes ipvs policies"),
    Jump(MANGLE, "OUTPUT", names.IPVS_ACCESS, "kubernetes ipvs policies"),
    Jump(NAT, "OUTPUT", names.SERVICES, "kubernetes service portals"),
    Jump(NAT, "PREROUTING", names.SERVICES, "kubernetes service portals"),
    Jump(NAT, "POSTROUTING", names.POSTROUTING, "kubernetes postrouting rules"),
    Jump(FILTER, "FORWARD", names.FORWARD, "kubernetes forwarding rules"),
    Jump(FILTER, "INPUT", names.NODE_PORT, "kubernetes health check rules"),
    Jump(FILTER, "INPUT", names.IPVS_FILTER, "kubernetes ipvs access filter"),
)
"""Inserted at the top of their chains."""


def skeleton(node: NodeView) -> dict[ChainKey, list[str]]:
    family = node.family

    def match(kind: SetKind, sides: str = "") -> str:
        return f"-m set --match-set {kind.full_name(family)} {sides or kind.sides}"

    def returns(*kinds: SetKind) -> list[str]:
        return [f"{match(kind)} -j RETURN" for kind in kinds]

    mark, accept, masquerade = mark_rules(node)
    to_mark = f"-j {names.MARK_MASQ}"
    return {
        (MANGLE, names.IPVS_ACCESS): [
            f"{NEW_CONNECTIONS} {match(names.LOAD_BALANCER_FW)} -j {names.SOURCE_RANGES}",
            *(
                f"{source}{match(names.SHORT_CIRCUIT)} -g {names.SHORT_CIRCUITS}"
                for source in _this_node(node.local_source)
            ),
            f"{NEW_CONNECTIONS} {match(names.NO_LOCAL)} -j DROP",
        ],
        (MANGLE, names.SOURCE_RANGES): [
            f"{match(names.SOURCE_CIDR, 'dst,dst,src')} -j RETURN",
            f"{match(names.SOURCE_IP, 'dst,dst,src')} -j RETURN",
            "-j DROP",
        ],
        (MANGLE, names.SHORT_CIRCUITS): [
            f"-j SET --map-set {names.SHORT_CIRCUIT.full_name(family)} dst,dst --map-mark"
        ],
        (NAT, names.SERVICES): [
            f"-s {family.loopback_cidr} -j RETURN",
            f"{match(names.LOAD_BALANCER_SET)} -g {names.LOAD_BALANCER}",
            *_masquerade_internal(node, match(names.CLUSTER_IP)),
            f"{match(names.EXTERNAL_IP)} {to_mark}",
            *returns(names.CLUSTER_IP, names.EXTERNAL_IP, names.EXTERNAL_IP_LOCAL),
            f"-m addrtype --dst-type LOCAL -j {names.NODE_PORT}",
        ],
        (NAT, names.LOAD_BALANCER): [f"{match(names.LOAD_BALANCER_LOCAL)} -j RETURN", to_mark],
        (NAT, names.NODE_PORT): [
            f"-p {protocol.name.lower()} {match(kind)} -j {target}"
            for protocol, (every, local) in names.NODE_PORT_SETS.items()
            for kind, target in ((local, "RETURN"), (every, names.MARK_MASQ))
        ],
        (NAT, names.POSTROUTING): [
            f"{match(names.LOOP_BACK, 'dst,dst,src')} -j MASQUERADE",
            # The node's own connections, for which the kernel chose the dialled VIP as source address.
            f"{match(names.IPVS_IPS, 'src')} -j MASQUERADE --random-fully",
            *masquerade,
        ],
        (NAT, names.MARK_MASQ): mark,
        (FILTER, names.FORWARD): accept,
        (FILTER, names.NODE_PORT): [f"{match(names.HEALTH_CHECK)} -j ACCEPT"],
        # Packets to VIPs that are not for a frontend must not reach programs listening on all addresses.
        (FILTER, names.IPVS_FILTER): [
            *returns(
                names.LOAD_BALANCER_SET, names.CLUSTER_IP, names.EXTERNAL_IP, names.EXTERNAL_IP_LOCAL,
                names.HEALTH_CHECK),
            no_frontend(family),
        ],
    }  # fmt: skip


def no_frontend(family: Family) -> str:
    """Return the rule that protects programs on the node from packets to VIPs, which are local addresses."""
    return f"{NEW_CONNECTIONS} -m set --match-set {names.IPVS_IPS.full_name(family)} dst -j {REJECT[family]}"


def _masquerade_internal(node: NodeView, match: str) -> list[str]:
    """Masquerade traffic to ClusterIPs, except from this node's pods."""
    if node.masquerade_all:
        return [f"{match} -j {names.MARK_MASQ}"]
    if node.local_source is None:
        return []
    return [f"{from_pods(node.local_source, negate=True)}{match} -j {names.MARK_MASQ}"]


def _this_node(source: LocalSource | None) -> list[str]:
    """Return matches for the node itself and, if they can be identified, for its pods."""
    pods = [] if source is None else [from_pods(source)]
    return [*pods, "-m addrtype --src-type LOCAL "]

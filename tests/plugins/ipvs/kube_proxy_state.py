"""The kernel objects of kube-proxy 1.36 in ipvs mode, as docs/design/behaviour/ipvs.md has them."""

import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from kproxy_core.contract.values import Update
from kproxy_core.model.address import Address, Family, Protocol, format_address
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_core.model.service import Destination
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ipvs import names
from kproxy_ipvs.batch import PutDestination, PutServer
from kproxy_ipvs.explain import State
from kproxy_ipvs.kernel import sets
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.names import FILTER, NAT, SetKind
from kproxy_ipvs.wanted import Scheduling, ServerKey, SetEntry
from kproxy_xtables.rules import REJECT, ChainKey

_NEW = "-m conntrack --ctstate NEW "


def kube_proxys_state(update: Update) -> State:
    """Return all objects for *update*."""
    node, plans = update.node, update.plans.values()
    servers = kube_proxys_servers(update)
    local = frozenset(address for plan in plans for address in _vips(plan))
    entries: defaultdict[SetKind, dict[str, int]] = defaultdict(dict)
    for plan in plans:
        for kind, entry in _entries(plan, node):
            entries[kind][entry] = 0
    entries[names.IPVS_IPS] = dict.fromkeys(map(format_address, local), 0)
    return State(
        _rules(update, entries), entries,
        lambda key: dict.fromkeys(servers[key], 1) if key in servers else None,
        lambda key, client: None, local)


def kube_proxys_servers(update: Update) -> dict[ServerKey, tuple[Destination, ...]]:
    """Return the virtual servers with their endpoints."""
    return dict(server for plan in update.plans.values() for server in _servers(plan, update.node))


def write_objects(update: Update) -> None:
    """Write all objects for *update* into the kernel."""
    family, state = update.node.family, kube_proxys_state(update)
    sets.create(family, names.SETS)
    sets.write(family, [SetEntry(kind, entry, 0) for kind, found in state.sets.items() for entry in found])
    with VirtualServers() as kernel:
        for key, endpoints in kube_proxys_servers(update).items():
            kernel.write([PutServer(key, Scheduling("rr"), new=True), *(
                PutDestination(key, where, 1, new=True) for where in endpoints)])
    subprocess.run(["ip", "link", "add", names.DEVICE, "type", "dummy"], check=True)
    for address in state.local:
        local = f"{format_address(address)}/{family.bits}"
        subprocess.run(["ip", "address", "add", local, "dev", names.DEVICE], check=True)
    lines = []
    for table in (NAT, FILTER):
        chains = {chain: rules for (of, chain), rules in state.rules.items() if of == table}
        lines += [f"*{table}", *(f":{chain} - [0:0]" for chain in chains if chain.startswith("KUBE-"))]
        lines += [f"-A {chain} {rule}" for chain, rules in chains.items() for rule in rules]
        lines.append("COMMIT")
    program = "iptables-restore" if family is Family.IPV4 else "ip6tables-restore"
    subprocess.run([program, "--noflush"], input="\n".join(lines) + "\n", text=True, check=True)


def _vips(plan: ServicePlan) -> Iterable[Address]:
    return [address for address in (plan.cluster_ip, *plan.external_addresses) if address is not None]


def _servers(plan: ServicePlan, node: NodeView) -> Iterator[tuple[ServerKey, tuple[Destination, ...]]]:
    protocol = plan.key.protocol
    internal = (plan.local or plan.cluster) if plan.internal_policy_local else plan.cluster
    external = (plan.local or plan.cluster) if plan.external_policy_local else plan.cluster
    for address in _vips(plan):
        chosen = internal if address == plan.cluster_ip else external
        yield ServerKey(plan.family, 0, address, protocol, plan.port), chosen
    for address in node.node_port_addresses if plan.node_port else ():
        yield ServerKey(plan.family, 0, address, protocol, plan.node_port), external


def _entries(plan: ServicePlan, node: NodeView) -> Iterator[tuple[SetKind, str]]:
    protocol = plan.key.protocol.name.lower()
    for address, port in plan.reachable:
        if address in plan.hairpins:
            host = format_address(address)
            yield names.LOOP_BACK, f"{host},{protocol}:{port},{host}"
    if plan.cluster_ip is not None:
        yield names.CLUSTER_IP, f"{format_address(plan.cluster_ip)},{protocol}:{plan.port}"
    for address in plan.external_ips:
        kind = names.EXTERNAL_IP_LOCAL if plan.external_policy_local else names.EXTERNAL_IP
        yield kind, f"{format_address(address)},{protocol}:{plan.port}"
    for address in plan.load_balancer_ips:
        entry = f"{format_address(address)},{protocol}:{plan.port}"
        yield names.LOAD_BALANCER_SET, entry
        if plan.external_policy_local:
            yield names.LOAD_BALANCER_LOCAL, entry
        if plan.source_ranges:
            yield names.LOAD_BALANCER_FW, entry
            yield from ((names.SOURCE_CIDR, f"{entry},{cidr}") for cidr in plan.source_ranges)
            if _admits(plan, node):
                yield names.SOURCE_IP, f"{entry},{format_address(address)}"
    if plan.node_port:
        every, of_local = names.NODE_PORT_SETS[plan.key.protocol]
        for kind in (every, of_local) if plan.external_policy_local else (every,):
            if plan.key.protocol is Protocol.SCTP:
                hosts = map(format_address, node.node_port_addresses)
                yield from ((kind, f"{host},sctp:{plan.node_port}") for host in hosts)
            else:
                yield kind, str(plan.node_port)
    if plan.health_check_node_port:
        yield names.HEALTH_CHECK, str(plan.health_check_node_port)


def _admits(plan: ServicePlan, node: NodeView) -> bool:
    return any(node.node_ip in cidr for cidr in plan.source_ranges if node.node_ip is not None)


def _rules(update: Update, entries: Mapping[SetKind, Mapping[str, int]]) -> dict[ChainKey, list[str]]:
    node = update.node
    family, bit = node.family, 1 << node.masquerade_bit

    def match(kind: SetKind, sides: str, *rest: str) -> list[str]:
        """Return a rule that exists only if the set has entries."""
        words = ("-m comment --comment purpose -m set --match-set", kind.full_name(family), sides, *rest)
        return [" ".join(words)] * bool(entries.get(kind))

    def externals(kind: SetKind) -> list[str]:
        return [
            *match(kind, "dst,dst", "-m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT"),
            *match(kind, "dst,dst", "-m addrtype --dst-type LOCAL -j ACCEPT"),
        ]

    def jump(chain: str) -> str:
        return f'-m comment --comment "kubernetes rules" -j {chain}'

    returned = (names.LOAD_BALANCER_SET, names.CLUSTER_IP, names.EXTERNAL_IP, names.EXTERNAL_IP_LOCAL)
    vip_as_source = [
        f"-s {format_address(address)}/{family.bits} -m ipvs --vproto {int(plan.key.protocol)} "
        f"--vaddr {format_address(address)}/{family.bits} --vport {plan.port} -j DROP"
        for plan in update.plans.values() if plan.source_ranges and not _admits(plan, node)
        for address in plan.load_balancer_ips
    ]  # fmt: skip
    return {
        (NAT, "OUTPUT"): [jump("KUBE-SERVICES")],
        (NAT, "PREROUTING"): [jump("KUBE-SERVICES")],
        (NAT, "POSTROUTING"): [jump("KUBE-POSTROUTING")],
        (FILTER, "FORWARD"): [jump("KUBE-PROXY-FIREWALL"), jump("KUBE-FORWARD")],
        (FILTER, "INPUT"): [
            jump("KUBE-IPVS-FILTER"), jump("KUBE-PROXY-FIREWALL"), jump("KUBE-NODE-PORT")],
        (FILTER, "OUTPUT"): [jump("KUBE-IPVS-OUT-FILTER")],
        (NAT, "KUBE-SERVICES"): [
            f"-s {family.loopback_cidr} -j RETURN",
            *match(names.LOAD_BALANCER_SET, "dst,dst", "-j KUBE-LOAD-BALANCER"),
            *match(names.CLUSTER_IP, *_masqueraded(node), "-j KUBE-MARK-MASQ"),
            *match(names.EXTERNAL_IP, "dst,dst", "-j KUBE-MARK-MASQ"),
            *externals(names.EXTERNAL_IP),
            *externals(names.EXTERNAL_IP_LOCAL),
            "-m addrtype --dst-type LOCAL -j KUBE-NODE-PORT",
            *match(names.CLUSTER_IP, "dst,dst", "-j ACCEPT"),
            *match(names.LOAD_BALANCER_SET, "dst,dst", "-j ACCEPT"),
        ],
        (NAT, "KUBE-LOAD-BALANCER"): [
            *match(names.LOAD_BALANCER_LOCAL, "dst,dst", "-j RETURN"), "-j KUBE-MARK-MASQ"],
        (NAT, "KUBE-NODE-PORT"): [
            f"-p {protocol.name.lower()} {rule}"
            for protocol, (every, of_local) in names.NODE_PORT_SETS.items()
            for kind, target in ((of_local, "RETURN"), (every, "KUBE-MARK-MASQ"))
            for rule in match(kind, kind.sides, "-j", target)
        ],
        (NAT, "KUBE-MARK-MASQ"): [f"-j MARK --set-xmark {bit:#x}/{bit:#x}"],
        (NAT, "KUBE-POSTROUTING"): [
            *match(names.LOOP_BACK, "dst,dst,src", "-j MASQUERADE"),
            f"-m mark ! --mark {bit:#x}/{bit:#x} -j RETURN",
            f"-j MARK --set-xmark {bit:#x}/0x0",
            "-j MASQUERADE --random-fully",
        ],
        (FILTER, "KUBE-FORWARD"): [
            f"-m mark --mark {bit:#x}/{bit:#x} -j ACCEPT",
            "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        ],
        (FILTER, "KUBE-NODE-PORT"): match(names.HEALTH_CHECK, "dst", "-j ACCEPT"),
        (FILTER, "KUBE-PROXY-FIREWALL"): match(
            names.LOAD_BALANCER_FW, "dst,dst", "-j KUBE-SOURCE-RANGES-FIREWALL"),
        (FILTER, "KUBE-SOURCE-RANGES-FIREWALL"): [
            *match(names.SOURCE_CIDR, "dst,dst,src", "-j RETURN"),
            *match(names.SOURCE_IP, "dst,dst,src", "-j RETURN"),
            "-j DROP",
        ],
        (FILTER, "KUBE-IPVS-FILTER"): [
            *(rule for kind in returned for rule in match(kind, "dst,dst", "-j RETURN")),
            *match(names.HEALTH_CHECK, "dst", "-j RETURN"),
            f"{_NEW}-m set --match-set {names.IPVS_IPS.full_name(family)} dst -j {REJECT[family]}",
        ],
        (FILTER, "KUBE-IPVS-OUT-FILTER"): vip_as_source,
    }  # fmt: skip


def _masqueraded(node: NodeView) -> tuple[str, str]:
    """Return the sides of the set of ClusterIPs, and the sources whose packets are masqueraded."""
    source: LocalSource | None = node.local_source
    if node.masquerade_all:
        return "dst,dst", ""
    if source is None:
        return "src,dst", ""
    return "dst,dst", f"! -s {source.cidr}" if source.cidr is not None else f"! -i {source.interface}+"

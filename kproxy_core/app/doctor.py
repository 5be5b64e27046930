"""The conditions of a node that hurt Services, found in its state: ``kproxy doctor``. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kproxy_core.app.drops import Drop, FilteredPacket
from kproxy_core.app.filters import place
from kproxy_core.linux.links import Link
from kproxy_core.linux.node_state import NodeState
from kproxy_core.model.address import Address, Family, Protocol, family_of, format_address, format_socket
from kproxy_core.model.service import Destination
from kproxy_core.nft.packet import NO_INTERFACE, Interface
from kproxy_core.observe.logs import printable

Json = dict[str, Any]


class Services(NamedTuple):
    """The Services that a proxy serves on this node."""

    mode: str
    is_running: bool
    """A kproxy serves them now."""
    node_ports: Sequence[tuple[int, str]]
    """Each with its service port."""
    endpoints: Sequence[Address]
    """Without repetitions, in the order of the service ports."""
    ports: Sequence["ServedPort"] = ()
    dials_endpoints: bool = False
    """Sockets of this node and its pods dial endpoints, so that only others send packets to frontends."""

    @classmethod
    def of(
        cls, mode: str, documents: Iterable[Mapping[str, Any]], *, is_running: bool,
        dials_endpoints: bool = False,
    ) -> "Services":
        """Return the Services of plans as `kproxy_core.app.changes.document` returns them."""
        node_ports: dict[tuple[int, str], None] = {}
        endpoints: dict[Address, None] = {}
        ports = []
        for plan in documents:
            port = ServedPort.of(plan)
            ports.append(port)
            node_ports |= {(number, port.name): None for address, number in port.frontends if address is None}
            endpoints |= dict.fromkeys(endpoint.address for endpoint in port.endpoints)
        return cls(mode, is_running, tuple(node_ports), tuple(endpoints), tuple(ports), dials_endpoints)


class ServedPort(NamedTuple):
    """A service port of one IP family."""

    name: str
    family: Family
    protocol: Protocol
    frontends: Sequence[tuple[Address | None, int]]
    """Address and port; None: any address of the node."""
    endpoints: Sequence[Destination]

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> "ServedPort":
        frontends: list[tuple[Address | None, int]] = []
        for text in plan["frontends"]:
            where, _, _ = text.rpartition("/")
            at_node, _, port = where.partition("node:")
            frontends.append(Destination.parse(where) if at_node else (None, int(port)))
        return cls(
            plan["service_port"], Family(plan["family"]), Protocol[plan["protocol"]], frontends,
            tuple(map(Destination.parse, plan["endpoints"])))


class Finding(NamedTuple):
    """One condition that hurts Services."""

    check: str
    what: str
    """One sentence, without a full stop."""
    evidence: Sequence[str]
    remedy: str


NOT_SERVED: Final = frozenset({"firewall", "translation", "ip-forward", "second-proxy"})
"""The checks whose findings keep Services from being served as they are meant. Others may hurt them."""


# Filter chains of other programs.


class Sample(NamedTuple):
    """A packet that chains of other programs should let pass."""

    what: str
    packet: FilteredPacket
    hook: str = ""
    """The only hook that is tried: the first, of a packet to a Service. "": those of forwarded packets."""
    port: ServedPort | None = None
    """The service port to which it is sent; None: not one alone."""

    @property
    def way(self) -> list[tuple[str, FilteredPacket]]:
        """The hooks that are tried, each with the packet there."""
        return [(hook, self.packet) for hook in ((self.hook,) if self.hook else _FORWARDED)]


_FORWARDED: Final = ("prerouting", "forward", "postrouting")


class Stop(NamedTuple):
    """A place where filter chains end a sample, and nft's text of the rule."""

    sample: Sample
    drop: Drop
    text: str = ""

    @property
    def is_harmless(self) -> bool:
        """Another program translates the packet to an endpoint of the same service port."""
        port = self.sample.port
        return port is not None and self.drop.translates_to in port.endpoints


_A_POD = Interface("a-pod", 0x7FFFFFFF)
"""The interface of a pod on a node without any."""


def samples(state: NodeState, services: Services | None) -> list[Sample]:
    """Return packets between a pod and another node in both directions, translated and not, by family.

    Then those of each sender to Services. Each stands for packets with many destinations; see `narrowed`.
    """
    found = [sample for family in _families(state) for sample in _samples(state, services, family)]
    if services is not None:
        found += [sample for family in _families(state) for sample in _to_services(state, services, family)]
    return found


def narrowed(sample: Sample, state: NodeState, services: Services | None) -> Iterator[Sample]:
    """Yield the packets for which *sample* stands: one for each endpoint's port, or for each frontend."""
    if services is None:
        return
    packet = sample.packet
    ports = [port for port in services.ports if port.family is packet.family and port.endpoints]
    if sample.hook:
        for port in ports:
            if port.protocol is packet.protocol:
                yield from _to_frontends(sample, port, state)
        return
    for protocol, number in dict.fromkeys(
            (port.protocol, endpoint.port) for port in ports for endpoint in port.endpoints):
        yield Sample(f"{sample.what}, {protocol.name} port {number}", packet._replace(
            protocol=protocol, port=number, dialled_port=None if packet.is_translated else number))


_OUTSIDE = "outside"


def _to_services(state: NodeState, services: Services, family: Family) -> Iterator[Sample]:
    """Yield a packet of each sender and protocol to any Service."""
    pods = pod_links(state)
    inside = next((link for link in pods if link.kind == "bridge"), next(iter(pods), None))
    at_pod = Interface(inside.name, inside.number) if inside else _A_POD
    uplink = next((link for link in state.links if link.name == state.uplinks.get(family)), None)
    senders = [] if services.dials_endpoints else [
        (f"a pod ({_told(None, at_pod)})", at_pod), ("this node", NO_INTERFACE)]
    if uplink is not None:
        senders.append((_OUTSIDE, Interface(uplink.name, uplink.number)))
    protocols = dict.fromkeys(port.protocol for port in services.ports if port.family is family)
    for protocol in protocols:
        for sender, arrives in senders:
            is_from_node = arrives == NO_INTERFACE
            packet = FilteredPacket(
                family, protocol, None, None, None, arrives, None, None, None, is_translated=True,
                is_from_node=is_from_node, is_to_node=False)
            yield Sample(f"from {sender}", packet, "output" if is_from_node else "prerouting")


def _to_frontends(sample: Sample, port: ServedPort, state: NodeState) -> Iterator[Sample]:
    """Yield *sample* to each frontend of *port* that such a sender may dial."""
    own = {each.address for each in state.addresses}
    uplink = {link.number for link in state.links if link.name == state.uplinks.get(port.family)}
    node = next((each.address for each in state.addresses
                 if each.link in uplink and each.network.family is port.family), None)
    for address, number in port.frontends:
        if address is not None and sample.what == f"from {_OUTSIDE}":
            continue
        dialled = node if address is None else address
        shown = f"node:{number}" if address is None else format_socket(address, number)
        packet = sample.packet._replace(
            destination=port.endpoints[0].address, port=port.endpoints[0].port, dialled=dialled,
            dialled_port=number, is_dialled_on_node=address is None or address in own)
        yield Sample(
            f"{sample.what} to {shown}/{port.protocol.name} of {port.name}", packet, sample.hook, port)


def _samples(state: NodeState, services: Services | None, family: Family) -> Iterator[Sample]:
    pods = {link.name: link for link in pod_links(state)}
    endpoints = [each for each in services.endpoints if family_of(each) is family] if services else []
    own = {each.address for each in state.addresses}
    local = next((each for each in endpoints if state.routes.get(each) in pods), None)
    remote = next((each for each in endpoints if each not in own and state.routes.get(each)
                   and state.routes[each] not in {*pods, "lo"}), None)
    inside = pods[state.routes[local]] if local else next(
        (link for link in pods.values() if link.kind == "bridge"), next(iter(pods.values()), None))
    at_pod = Interface(inside.name, inside.number) if inside else _A_POD
    source = local or (_neighbour(state, inside, family) if inside else None)
    numbers = {link.name: link.number for link in state.links}
    outside = state.routes[remote] if remote else state.uplinks.get(family, "")
    if outside in ("", "lo", at_pod.name):
        return
    uplink = Interface(outside, numbers.get(outside, 0))
    pod, node = f"a pod ({_told(source, at_pod)})", f"another node ({_told(remote, uplink)})"
    for is_translated in (True, False):
        yield Sample(
            f"from {pod} to {node}",
            _packet(family, source, remote, at_pod, uplink, is_translated=is_translated))
        yield Sample(
            f"from {node} to {pod}",
            _packet(family, remote, source, uplink, at_pod, is_translated=is_translated))


def _packet(
    family: Family, source: Address | None, destination: Address | None, arrives: Interface,
    leaves: Interface, *, is_translated: bool,
) -> FilteredPacket:
    dialled = None if is_translated else destination
    return FilteredPacket(
        family, Protocol.TCP, source, destination, None, arrives, leaves, dialled, None,
        is_translated=is_translated, is_from_node=False, is_to_node=False)


def _told(address: Address | None, interface: Interface) -> str:
    known = f"{format_address(address)}, " if address else ""
    return f"{known}{interface.name}" if interface != _A_POD else f"{known}any interface"


def _neighbour(state: NodeState, link: Link, family: Family) -> Address | None:
    """Return an address in the network of *link*, as a pod has; None without such a network."""
    for each in state.addresses:
        network = each.network
        if each.link == link.number and network.family is family and network.prefix < family.bits - 1 and (
                not each.address.startswith(b"\xfe\x80")):
            first = int.from_bytes(network.network, "big") + 1
            hosts = (Address(number.to_bytes(family.size, "big")) for number in (first, first + 1))
            return next(host for host in hosts if host != each.address)
    return None


def _families(state: NodeState) -> list[Family]:
    """Return IPv4, and IPv6 if this node has such an address that is neither loopback nor link-local."""
    loopback = {link.number for link in state.links if link.is_loopback}
    has_ipv6 = any(
        each.network.family is Family.IPV6 and not each.address.startswith(b"\xfe\x80")
        and each.link not in loopback for each in state.addresses)
    return [Family.IPV4, Family.IPV6] if has_ipv6 else [Family.IPV4]


_DOCKERS_BRIDGE = re.compile(r"docker\d+|br-[0-9a-f]{12}")


def pod_links(state: NodeState) -> list[Link]:
    """Return the interfaces of pods: pairs with another namespace, or the bridges that those are ports of.

    Bridges of Docker are left out.
    """
    by_number = {link.number: link for link in state.links}
    found: dict[Link, None] = {}
    for link in _pod_ports(state):
        found[by_number.get(link.master, link)] = None
    return list(found)


def _pod_ports(state: NodeState) -> list[Link]:
    """Return the node's ends of the pairs that lead to pods.

    The uplink of a node that is a container itself is an end of such a pair, too, and no pod's.
    """
    by_number = {link.number: link for link in state.links}
    pairs = [link for link in state.links if link.leads_elsewhere and link.kind in ("veth", "netkit")
             and link.name not in state.uplinks.values()]
    return [link for link in pairs if link.master not in by_number or not _DOCKERS_BRIDGE.fullmatch(
        by_number[link.master].name)]


# Programs that write filter chains, by the names of their tables and chains.


class _Owner(NamedTuple):
    name: str
    remedy: str
    tables: tuple[str, ...] = ()
    chains: tuple[str, ...] = ()
    """Beginnings of names. A policy is theirs if its table has such a chain."""

    def wrote(self, drop: Drop, chains: frozenset[str]) -> bool:
        return drop.table in self.tables or any(
            name.startswith(self.chains) for name in (chains if drop.rule is None else {drop.chain}))


_OWNERS: Final = (
    _Owner(
        "firewalld", "put the pods' networks into a zone that accepts: firewall-cmd --permanent "
        "--zone=trusted --add-source=NETWORK && firewall-cmd --reload",
        tables=("firewalld",), chains=("FWD_",)),
    _Owner(
        "ufw", "ufw default allow routed, or ufw route allow from NETWORK and ufw route allow to NETWORK",
        chains=("ufw-", "ufw6-")),
    _Owner(
        "Docker", "accept the pods' networks: iptables -I DOCKER-USER -s NETWORK -j ACCEPT, and the same "
        "with -d; Docker leaves the policy alone if net.ipv4.ip_forward is 1 before it starts",
        tables=("docker-bridges",), chains=("DOCKER",)),
)
_REMEDY = "accept packets from and to the pods' networks before this rule"
_REMEDY_OF_TRANSLATION = (
    "remove what that rule is for, such as a hostPort that is a node port, too; `kproxy explain` follows "
    "single packets")
_MOST_NAMED = 6
"""Senders and frontends in one finding."""


def drop_findings(
    stops: Sequence[Stop], chains_of: Mapping[tuple[str, str], frozenset[str]]
) -> list[Finding]:
    """Return a finding for each place that certainly ends a sample.

    *chains_of*: the names of the chains of each table, by family and name.
    """
    by_place: dict[tuple[str, str, str, int | None, bool], list[Stop]] = {}
    for stop in stops:
        if stop.drop.is_certain and not stop.is_harmless:
            key = stop.drop.family, stop.drop.table, stop.drop.chain, stop.drop.rule, bool(stop.sample.hook)
            by_place.setdefault(key, []).append(stop)
    found = []
    for of_place in by_place.values():
        drop, text = of_place[0].drop, of_place[0].text
        chains = chains_of.get((drop.family, drop.table), frozenset())
        owner = next((each for each in _OWNERS if each.wrote(drop, chains)), None)
        evidence = [place(drop, "them"), *([f"rule: {printable(text)}"] if text else []),
                    *_ways([stop.sample for stop in of_place])]
        if drop.translates_to is not None:
            found.append(Finding(
                "translation", f"{owner.name if owner else 'another program'} translates packets to Services "
                "before kproxy does, and no endpoint gets them", evidence, _REMEDY_OF_TRANSLATION))
            continue
        whose = f"{owner.name} " if owner else "a filter of another program "
        which = "to Services" if of_place[0].sample.hook else "that this node forwards"
        found.append(Finding(
            "firewall", f"{whose}{'rejects' if drop.rejects else 'drops'} packets {which}", evidence,
            owner.remedy if owner else _REMEDY))
    return found


def _ways(stopped: Sequence[Sample]) -> Iterator[str]:
    ways: dict[str, list[str]] = {}
    to_services = list(dict.fromkeys(sample.what for sample in stopped if sample.hook))
    yield from (printable(f"new connections {what}") for what in to_services[:_MOST_NAMED])
    if len(to_services) > _MOST_NAMED:
        yield f"and {len(to_services) - _MOST_NAMED} more"
    for sample in stopped:
        if sample.hook:
            continue
        ways.setdefault(sample.what, []).append(
            "through Services" if sample.packet.is_translated else "directly")
    for what, how in ways.items():
        yield printable(f"new connections {what}, {' and '.join(how)}")


# The other checks.

_Found = Iterator[Finding]


def _foreign_tables(state: NodeState, services: Services | None) -> _Found:
    for problem in state.unread_tables:
        yield Finding(
            "foreign-table", "libnftables on this node cannot read another program's table",
            [printable(problem)],
            "use the same release of nft for both, the newer one: other programs that list rules here, "
            "kube-proxy in nftables mode among them, fail at this table")


def _second_proxy(state: NodeState, services: Services | None) -> _Found:
    found: dict[str, list[str]] = {}
    for process in state.proxies:
        name = "Cilium" if process.name == "cilium-agent" else process.name
        if name != "Cilium" or state.has_socket_translation:
            found.setdefault(name, []).append(f"process {process.pid} ({process.name})")
    if state.has_socket_translation:
        found.setdefault("Cilium", []).append("it translates addresses of Services in sockets (socket LB)")
    for table in state.tables:
        if table.name == "kube-proxy":
            found.setdefault("kube-proxy", []).append(f"nft table {table.family} kube-proxy")
    if services is None or not services.is_running or services.mode not in _WRITES_KUBE_CHAINS:
        for where in state.service_chains:
            found.setdefault("kube-proxy", []).append(f"chain KUBE-SERVICES in table {where}")
    if services is not None and services.is_running:
        found["kproxy"] = [f"a running proxy in mode {services.mode}"]
    if len(found) < 2:
        return
    yield Finding(
        "second-proxy", f"{' and '.join(sorted(found))} serve the same Services",
        [f"{name}: {what}" for name, seen in sorted(found.items()) for what in seen],
        "keep one of them: delete the other's DaemonSet, then its rules (kube-proxy --cleanup, or "
        "kproxy --cleanup)")


_WRITES_KUBE_CHAINS = ("iptables", "ipvs", "userspace")


def _forwarding(state: NodeState, services: Services | None) -> _Found:
    names = {Family.IPV4: "net/ipv4/ip_forward", Family.IPV6: "net/ipv6/conf/all/forwarding"}
    for family in _families(state):
        if state.settings.get(names[family]) == "0":
            name = names[family].replace("/", ".")
            yield Finding(
                "ip-forward", f"this node forwards no {family.label} packets", [f"{name} = 0"],
                f"sysctl -w {name}=1, and the same in /etc/sysctl.d")


def _reverse_path(state: NodeState, services: Services | None) -> _Found:
    """Find strict filters that matter: with one uplink, packets arrive where the answers leave."""
    not_uplinks = {link.number for link in state.links if link.is_loopback or not link.is_up
                   or link.kind in ("dummy", *_TUNNELS) or _DOCKERS_BRIDGE.fullmatch(link.name)}
    not_uplinks |= {link.number for link in pod_links(state)}
    numbered = {each.link for each in state.addresses if each.network.family is Family.IPV4}
    uplinks = [link for link in state.links if link.number in numbered - not_uplinks]
    general = _int(state.settings.get("net/ipv4/conf/all/rp_filter"))
    strict = [link.name for link in uplinks if max(
        general, _int(state.settings.get(f"net/ipv4/conf/{link.name}/rp_filter"))) == 1]
    if len(uplinks) > 1 and strict:
        yield Finding(
            "rp-filter",
            "packets are dropped that arrive by another interface than the answers would leave by",
            [f"rp_filter is strict (1) on {', '.join(map(printable, strict))}",
             f"interfaces with addresses: {', '.join(printable(link.name) for link in uplinks)}"],
            "sysctl -w net.ipv4.conf.all.rp_filter=2 (loose)")


def _bridges(state: NodeState, services: Services | None) -> _Found:
    """Find bridges whose pods lose answers of Services, or cannot reach themselves by a Service."""
    by_number = {link.number: link for link in state.links}
    ports: dict[Link, list[Link]] = {}
    for port in _pod_ports(state):
        if port.master in by_number and by_number[port.master].kind == "bridge":
            ports.setdefault(by_number[port.master], []).append(port)
    families = _families(state)
    for bridge, of_bridge in ports.items():
        name = printable(bridge.name)
        for family, own in zip(Family, bridge.calls, strict=True):
            setting = f"net/bridge/bridge-nf-call-{family.ip}tables"
            if family not in families or own or state.settings.get(setting) == "1":
                continue
            value = state.settings.get(setting)
            yield Finding(
                "bridge-nf-call",
                f"{family.label} answers of a pod to another pod of bridge {name} skip the translation back",
                [f"{setting.replace('/', '.')} {'does not exist' if value is None else f'= {value}'}",
                 f"pods at bridge {name}: {len(of_bridge)}"],
                f"modprobe br_netfilter; sysctl -w {setting.replace('/', '.')}=1")
        is_called = bridge.calls[0] or state.settings.get("net/bridge/bridge-nf-call-iptables") == "1"
        off = [port.name for port in of_bridge if not port.has_hairpin]
        if is_called and off and not bridge.is_promiscuous:
            more = f" and {len(off) - 3} more" if len(off) > 3 else ""
            yield Finding(
                "hairpin", f"pods of bridge {name} cannot reach themselves by a Service",
                [f"hairpin is off at {', '.join(map(printable, off[:3]))}{more}"],
                "\"hairpinMode\": true in the CNI configuration of the bridge plugin; for pods that run: "
                "bridge link set dev PORT hairpin on")


_NEARLY_FULL = 0.9


def _conntrack(state: NodeState, services: Services | None) -> _Found:
    count = _int(state.settings.get("net/netfilter/nf_conntrack_count"))
    most = _int(state.settings.get("net/netfilter/nf_conntrack_max"))
    if most and count >= most * _NEARLY_FULL:
        yield Finding(
            "conntrack", "the table of tracked connections is nearly full: new connections will be dropped",
            [f"net.netfilter.nf_conntrack_count = {count}", f"net.netfilter.nf_conntrack_max = {most}"],
            "raise conntrack.maxPerCore in the configuration, or find who opens so many: conntrack -L")


def _node_ports(state: NodeState, services: Services | None) -> _Found:
    limits = state.settings.get("net/ipv4/ip_local_port_range", "").split()
    if services is None or len(limits) != 2:
        return
    first, last = map(_int, limits)
    reserved = _ranges(state.settings.get("net/ipv4/ip_local_reserved_ports", ""))
    taken = sorted((port, of) for port, of in services.node_ports if first <= port <= last and not any(
        low <= port <= high for low, high in reserved))
    if taken:
        shown = [f"node port {port} of {of}" for port, of in taken[:5]]
        more = [f"and {len(taken) - 5} more"] if len(taken) > 5 else []
        ports = ",".join(str(port) for port in dict.fromkeys(port for port, _ in taken))
        yield Finding(
            "node-ports", "connections of this node may use a node port as their source port",
            [f"net.ipv4.ip_local_port_range = {first} {last}", *shown, *more],
            "sysctl -w net.ipv4.ip_local_reserved_ports with the API server's --service-node-port-range"
            if len(taken) > 5 else f"add {ports} to net.ipv4.ip_local_reserved_ports")


def _ranges(text: str) -> list[tuple[int, int]]:
    found = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.append((_int(first), _int(last or first)))
    return found


_TUNNELS = ("vxlan", "geneve", "ipip", "ip6tnl", "sit", "gre", "wireguard")


def _mtu(state: NodeState, services: Services | None) -> _Found:
    pods = _pod_ports(state)
    if not pods:
        return
    largest = max(pods, key=lambda link: link.mtu)
    by_name = {link.name: link for link in state.links}
    inside = {link.name for link in (*pods, *pod_links(state))}
    ways = {state.routes[each] for each in services.endpoints if each in state.routes} if services else set()
    ways |= {link.name for link in state.links if link.kind in _TUNNELS} or set(state.uplinks.values())
    for name in sorted(ways - inside - {"", "lo"}):
        link = by_name.get(name)
        if link is not None and link.is_up and link.mtu < largest.mtu:
            yield Finding(
                "mtu", f"packets of pods may be too large for {printable(name)}",
                [f"{printable(name)} has an MTU of {link.mtu}",
                 f"{printable(largest.name)} of a pod has one of {largest.mtu}"],
                f"set the MTU of pods to {link.mtu} in the CNI configuration, and restart them")


def _clock(state: NodeState, services: Services | None) -> _Found:
    if not state.is_clock_synchronized:
        yield Finding(
            "clock", "no time service keeps this node's clock",
            ["adjtimex(2): the clock is not synchronized"],
            "run chrony or systemd-timesyncd: certificates and tokens of the API server depend on the time")


def _cgroups(state: NodeState, services: Services | None) -> _Found:
    if state.cgroup_v1:
        yield Finding(
            "cgroup", "this node uses cgroup v1",
            [f"cgroup v1 is mounted at {printable(state.cgroup_v1)}"],
            "boot with systemd.unified_cgroup_hierarchy=1: the kubelet of Kubernetes 1.35 does not start "
            "with cgroup v1 (KEP-5573)")


class _Fault(NamedTuple):
    """A fault of some kernels."""

    first: tuple[int, ...]
    fixed: Mapping[tuple[int, int], tuple[int, ...]]
    """By branch, the first release without it. Branches in between that are not named have it."""
    behind: tuple[int, ...]
    """The first release that never had it."""
    what: str
    concerns: Callable[[NodeState], bool]
    remedy: str
    source: str


_FAULTS: Final = (
    _Fault(
        (0,), {(5, 6): (5, 6, 13), (5, 4): (5, 4, 41), (4, 19): (4, 19, 123), (4, 14): (4, 14, 181)}, (5, 7),
        "masqueraded packets of VXLAN leave with wrong checksums: connections take 1 to 63 s longer",
        lambda state: any(link.kind == "vxlan" for link in state.links),
        "use a newer kernel, or ethtool -K DEVICE tx-checksum-ip-generic off on the VXLAN device",
        "https://github.com/kubernetes/kubernetes/issues/88986"),
    _Fault(
        (5, 15, 168), {(5, 15): (5, 15, 170)}, (5, 16),
        "ip6tables has no target MARK, which rules of Services need", lambda state: True,
        "use a newer kernel", "https://github.com/bottlerocket-os/bottlerocket/issues/4295"),
    _Fault(
        (6, 6, 57), {(6, 6): (6, 6, 59)}, (6, 7),
        "ip6tables has no target MARK, which rules of Services need", lambda state: True,
        "use a newer kernel", "https://github.com/tailscale/tailscale/issues/13863"),
    _Fault(
        (6, 11, 4), {(6, 11): (6, 11, 6)}, (6, 12),
        "ip6tables has no target MARK, which rules of Services need", lambda state: True,
        "use a newer kernel", "https://github.com/tailscale/tailscale/issues/13863"),
)


def _kernel(state: NodeState, services: Services | None) -> _Found:
    release = tuple(map(int, re.findall(r"\d+", state.kernel.partition("-")[0])))
    for fault in _FAULTS:
        major, minor, *_ = (*release, 0, 0)
        fixed = fault.fixed.get((major, minor), fault.behind)
        if fault.first <= release < fixed and fault.concerns(state):
            yield Finding(
                "kernel", f"this kernel has a known fault, unless the distribution repaired it: {fault.what}",
                [f"Linux {printable(state.kernel)}", fault.source], fault.remedy)


def _int(text: str | None) -> int:
    return int(text) if text and text.strip().isdecimal() else 0


_CHECKS: Final[Sequence[Callable[[NodeState, Services | None], _Found]]] = (
    _foreign_tables, _second_proxy, _forwarding, _reverse_path, _bridges, _conntrack, _node_ports, _mtu,
    _clock, _cgroups, _kernel,
)  # fmt: skip
"""All but that of filter chains, which needs a packet's way: see `drop_findings`."""


def findings(state: NodeState, services: Services | None) -> list[Finding]:
    """Return what hurts Services, apart from filter chains."""
    return [finding for check in _CHECKS for finding in check(state, services)]


def unclear(state: NodeState, stops: Sequence[Stop]) -> list[str]:
    """Return what is not known, one sentence each."""
    found = dict.fromkeys(printable(problem) for problem in state.problems)
    for table in state.legacy_tables:
        if table.partition(" ")[2] in ("filter", "mangle", "raw", "security"):
            found[f"table {printable(table)} of iptables-legacy is not read"] = None
    doubtful = (stop.drop for stop in stops if stop.drop.is_met and stop.drop.doubts)
    return list(found | dict.fromkeys(place(drop, "them") for drop in doubtful))

"""The table that kube-proxy 1.36 or 1.38 writes in nftables mode.

docs/design/behaviour/nftables.md has it, and docs/design/behaviour/changes.md what is new in 1.38.
"""

from collections import defaultdict
from collections.abc import Iterator

from kproxy_core.contract.values import Update
from kproxy_core.model.address import Family, format_address
from kproxy_core.model.node import LocalSource
from kproxy_core.model.service import Destination
from kproxy_core.plan.service_plan import ServicePlan

_KEY = "inet_proto . inet_service"
_PROTOCOLS = ("tcp", "udp", "sctp")


def kube_proxys_table(update: Update, *, release: str = "1.36") -> str:
    """Return the table for *update*, as input for nft.

    *release* is 1.36, or 1.38 with node ports on other addresses than localhost.
    """
    return _Table(update, release).text()


class _Table:
    def __init__(self, update: Update, release: str) -> None:
        self._is_newer = release == "1.38"
        self._node, self._plans = update.node, update.plans
        v4 = self._node.family is Family.IPV4
        self._ip, self._type = ("ip", "ipv4_addr") if v4 else ("ip6", "ipv6_addr")
        self._mark = f"meta mark set mark or {1 << self._node.masquerade_bit:#x}"
        self._chains: defaultdict[str, list[str]] = defaultdict(list)
        self._elements: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._affinities: dict[str, int] = {}

    def text(self) -> str:
        node_ips = map(format_address, self._node.node_port_addresses)
        self._elements["nodeport-ips"] = dict.fromkeys(node_ips, "")
        for plan in self._plans.values():
            self._service(plan)
        self._fixed_rules()
        body = (*self._counters(), *self._sets(), *self._written_chains())
        return f"table {self._ip} kube-proxy {{\n{''.join(body)}}}\n"

    def _service(self, plan: ServicePlan) -> None:
        protocol = plan.key.protocol.name.lower()
        name = f"{plan.key.namespace}/{plan.key.name}/{protocol}/{plan.key.port_name}"
        refusal = "drop" if plan.has_endpoints else "goto reject-chain"
        if plan.cluster_ip is not None:
            vip = format_address(plan.cluster_ip)
            self._elements["cluster-ips"][vip] = ""
            key = f"{vip} . {protocol} . {plan.port}"
            if plan.has_internal_endpoints:
                chain = "local" if plan.internal_policy_local else "service"
                self._elements["service-ips"][key] = f"goto {chain}-{name}"
            else:
                self._elements["no-endpoint-services"][key] = refusal
        frontends = [
            ("service-ips", "no-endpoint-services", f"{format_address(address)} . {protocol} . {plan.port}")
            for address in plan.external_addresses
        ]
        if plan.node_port:
            frontends.append(("service-nodeports", "no-endpoint-nodeports", f"{protocol} . {plan.node_port}"))
            rejects = f"goto localhost-nodeport-reject-{protocol}"
            self._elements["localhost-nodeport-reject-ports"][f"{protocol} . {plan.node_port}"] = rejects
        for served, unserved, key in frontends:
            if plan.has_endpoints:
                self._elements[served][key] = f"goto external-{name}"
            if not plan.has_external_endpoints:
                self._elements[unserved][key] = refusal
        if plan.source_ranges:
            ranges = ", ".join(map(str, plan.source_ranges))
            self._chains[f"firewall-{name}"].append(f"{self._ip} saddr != {{ {ranges} }} drop")
            for address in plan.load_balancer_ips:
                self._elements["firewall-ips"][
                    f"{format_address(address)} . {protocol} . {plan.port}"] = f"goto firewall-{name}"
        if frontends and plan.has_endpoints:
            self._chains[f"external-{name}"] += self._external(plan, name)
        self._balance(f"service-{name}", name, plan, plan.cluster)
        self._balance(f"local-{name}", name, plan, plan.local)
        for address, port in plan.reachable:
            if address in plan.hairpins:
                text = format_address(address)
                self._elements["hairpin-connections"][f"{text} . {text} . {protocol} . {port}"] = ""

    def _external(self, plan: ServicePlan, name: str) -> Iterator[str]:
        if not plan.external_policy_local:
            yield f'{self._mark} comment "masquerade"'
            yield f"goto service-{name}"
            return
        if source := self._local("", self._node.local_source):
            yield f'{source} goto service-{name} comment "short-circuit pod traffic"'
        yield f"fib saddr type local {self._mark}"
        yield f"fib saddr type local goto service-{name}"
        if plan.has_external_endpoints:
            yield f"goto local-{name}"

    def _balance(self, chain: str, name: str, plan: ServicePlan, endpoints: tuple[Destination, ...]) -> None:
        if not endpoints:
            return
        protocol = plan.key.protocol.name.lower()
        hosts = [(format_address(address), port) for address, port in endpoints]
        if not plan.affinity_seconds and len(hosts) == 1 and self._is_newer:
            self._chains[chain].append(f"meta l4proto {protocol} dnat to {_socket(*hosts[0])}")
            return
        if not plan.affinity_seconds:
            values = ", ".join(f"{at} : {host} . {port}" for at, (host, port) in enumerate(hosts))
            self._chains[chain].append(
                f"meta l4proto {protocol} dnat {self._ip} addr . port to "
                f"numgen random mod {len(hosts)} map {{ {values} }}")
            return
        names = [f"{name}__{host.replace(':', '.')}/{port}" for host, port in hosts]
        self._chains[chain] += [f"{self._ip} saddr @affinity-{each} goto endpoint-{each}" for each in names]
        values = ", ".join(f"{at} : goto endpoint-{each}" for at, each in enumerate(names))
        self._chains[chain].append(f"numgen random mod {len(hosts)} vmap {{ {values} }}")
        for each, (host, port) in zip(names, hosts, strict=True):
            self._affinities[f"affinity-{each}"] = plan.affinity_seconds
            self._chains[f"endpoint-{each}"] = [
                f"update @affinity-{each} {{ {self._ip} saddr }}",
                f"meta l4proto {protocol} dnat to {_socket(host, port)}"]

    def _fixed_rules(self) -> None:
        node, ip = self._node, self._ip
        vip, port = f"{ip} daddr . meta l4proto . th dport vmap", "meta l4proto . th dport vmap"
        to_node = f"{ip} daddr @nodeport-ips"
        if not node.masquerade_all:
            source = self._local("!= ", node.local_source)
            masquerading = f"{ip} daddr @cluster-ips {source} {self._mark}" if source else ""
        else:
            masquerading = f"{ip} daddr @cluster-ips {self._mark}"
        fixed = {
            "services": [f'{masquerading} comment "masquerade clusterIP traffic"'] * bool(masquerading) + [
                f"{vip} @service-ips", f"{to_node} {port} @service-nodeports"],
            "masquerading": [
                f"meta mark and {1 << node.masquerade_bit:#x} != 0 "
                f"meta mark set mark xor {1 << node.masquerade_bit:#x} masquerade fully-random",
                f"ct status dnat {ip} saddr . {ip} daddr . meta l4proto . th dport @hairpin-connections "
                "masquerade fully-random"],
            "service-endpoints-check": [f"{vip} @no-endpoint-services"],
            "nodeport-endpoints-check": [f"{to_node} {port} @no-endpoint-nodeports"],
            "firewall-check": [f"{vip} @firewall-ips"],
            "reject-chain": ["reject"],
            "cluster-ips-check": [
                f'{ip} daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"'],
        }  # fmt: skip
        if self._is_newer:
            loopback = f"{ip} daddr {node.family.loopback_cidr}".removesuffix("/128")
            fixed["nodeport-endpoints-check"].append(f"{loopback} {port} @localhost-nodeport-reject-ports")
            for name in _PROTOCOLS:
                rule = f'counter name "localhost-nodeport-rejected-{name}" reject'
                fixed[f"localhost-nodeport-reject-{name}"] = [rule]
        jumps = {
            "filter-input": ("input", 0, ["nodeport-endpoints-check", "service-endpoints-check"]),
            "filter-forward": ("forward", 0, ["service-endpoints-check", "cluster-ips-check"]),
            "filter-output": ("output", 0, ["service-endpoints-check", "cluster-ips-check"]),
            "filter-prerouting-pre-dnat": ("prerouting", -110, ["firewall-check"]),
            "filter-output-pre-dnat": ("output", -110, ["firewall-check"]),
        }
        translating = {
            "nat-output": ("output", -100, "services"), "nat-prerouting": ("prerouting", -100, "services"),
            "nat-postrouting": ("postrouting", 100, "masquerading"),
        }  # fmt: skip
        self._chains = defaultdict(list, fixed | self._chains)
        for chain, (hook, priority, targets) in jumps.items():
            self._chains[chain] = [f"type filter hook {hook} priority {priority};",
                                   *(f"ct state new jump {target}" for target in targets)]
        for chain, (hook, priority, target) in translating.items():
            self._chains[chain] = [f"type nat hook {hook} priority {priority};", f"jump {target}"]

    def _local(self, negated: str, source: LocalSource | None) -> str:
        if source is None:
            return ""
        if source.cidr is not None:
            return f"{self._ip} saddr {negated}{source.cidr}"
        return f'iifname {negated}"{source.interface}"'

    def _counters(self) -> Iterator[str]:
        for name in _PROTOCOLS if self._is_newer else ():
            yield f"counter localhost-nodeport-rejected-{name} {{ }}\n"

    def _sets(self) -> Iterator[str]:
        types = {
            "cluster-ips": self._type, "nodeport-ips": self._type,
            "hairpin-connections": f"{self._type} . {self._type} . {_KEY}",
        }
        of_vips = ("service-ips", "no-endpoint-services", "firewall-ips")
        maps = dict.fromkeys(of_vips, f"{self._type} . {_KEY}")
        newer = ["localhost-nodeport-reject-ports"] if self._is_newer else []
        maps |= dict.fromkeys(("service-nodeports", "no-endpoint-nodeports", *newer), _KEY)
        for name, seconds in self._affinities.items():
            yield f"set {name} {{ type {self._type}; flags dynamic,timeout; timeout {seconds}s; }}\n"
        for name, kind in types.items():
            yield f"set {name} {{ type {kind}; {self._listed(name)} }}\n"
        for name, kind in maps.items():
            yield f"map {name} {{ type {kind} : verdict; {self._listed(name)} }}\n"

    def _listed(self, name: str) -> str:
        comment = ' comment "some/service:p"' if name.startswith("no-endpoint") else ""
        elements = ", ".join(
            f"{key}{comment} : {value}" if value else key for key, value in self._elements[name].items())
        return f"elements = {{ {elements} }}" if elements else ""

    def _written_chains(self) -> Iterator[str]:
        """Yield chains before those that lead to them."""
        targets = ("endpoint-", "service-", "local-", "external-", "firewall-", "reject-chain")
        ordered = sorted(self._chains, key=lambda name: next(
            (at for at, head in enumerate(targets) if name.startswith(head)), len(targets)))
        yield from (f"chain {name} {{ }}\n" for name in ordered if "hook" not in self._chains[name][0])
        for name in ordered:
            yield f"chain {name} {{\n    " + "\n    ".join(self._chains[name]) + "\n}\n"


def _socket(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

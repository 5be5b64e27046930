"""Services and endpoints of any shape, and what must become of packets to them: the specification once more.

Nothing of kproxy is used here, for this judges it. Endpoints and clients are hosts of the harness's topology.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

Json = dict[str, Any]
Where = tuple[str, int]
"""An endpoint's host and port."""

NODE = "kc-node"
HERE = frozenset({"pod1", "pod2", "node"})
"""Hosts of the node under test."""
HOSTS = ("pod1", "pod2", "pod3", "pod4", "node", "node2")
PODS = frozenset({"pod1", "pod2"})
"""Clients that count as local traffic."""
NETWORK_OF = {
    "client": "$lan_net", "crowd5": "$crowd_net", "pod1": "$local_pod_net", "pod2": "$local_pod_net",
    "node": "$lan_net",
}  # fmt: skip
"""Clients, and the symbol of the network that each is in."""

_SERVICES, _SLICES, _PORTS = 3, 2, 3
_RESTING = {"kproxy.dev/weight": "0"}
_WEIGHTS: tuple[Json, ...] = ({}, {}, {}, {}, _RESTING, {"kproxy.dev/weight": "30"})
_CONDITIONS: tuple[Json, ...] = (
    {"ready": True}, {"ready": True}, {"ready": True}, {"ready": False},
    {"ready": False, "serving": True, "terminating": True},
    {"ready": False, "serving": False, "terminating": True},
    {"ready": True, "serving": False, "terminating": True},
)  # fmt: skip


class Fate(NamedTuple):
    """The fate of a connection."""

    outcome: str
    """``reached``, ``refused`` or ``dropped``."""
    endpoints: frozenset[Where] = frozenset()
    """Each of them may be reached, and no other."""
    masqueraded: bool = False
    empty: bool = False
    """No endpoint is usable anywhere."""


class Attempt(NamedTuple):
    """A client that talks to a frontend of a Service."""

    client: str
    kind: str
    """``vip``, ``ext``, ``lb`` or ``node port``."""
    to: str
    """The symbol of the address."""
    port: int
    service: Json
    name: str
    """Of the service port."""
    protocol: str

    @property
    def sticky(self) -> bool:
        return "sessionAffinity" in self.service

    @property
    def affinity(self) -> tuple[str, str, str]:
        """The client and the service port for which it may be pinned, whichever frontend it uses."""
        return self.client, self.service["name"], self.name

    def __str__(self) -> str:
        return f"{self.client} to {self.kind} {self.to}:{self.port}/{self.protocol} of {self.service}"


@dataclass
class World:
    """All objects, as the harness abbreviates them. The same *random* makes the same world."""

    random: Random
    services: dict[int, Json] = field(default_factory=dict)
    slices: dict[tuple[int, int], Json] = field(default_factory=dict)
    zone: str = ""

    def change(self) -> Iterator[Json | str]:
        """Change something here and there: objects to apply, and references to those to delete."""
        for _ in range(self.random.randint(1, 6)):
            number, piece = self.random.randrange(_SERVICES), self.random.randrange(_SLICES)
            dice = self.random.random()
            if dice < 0.3:
                self.services[number] = self._service(number)
                yield {"service": dict(self.services[number])}
            elif dice < 0.35:
                if self.services.pop(number, None):
                    yield f"Service/any{number}"
            elif dice < 0.75:
                self.slices[number, piece] = self._slice(number, piece)
                yield {"slice": dict(self.slices[number, piece])}
            elif dice < 0.82:
                if self.slices.pop((number, piece), None):
                    yield f"EndpointSlice/any{number}-{piece}"
            else:
                self.zone = self.random.choice("aabbc")
                yield {"node": {"labels": {"topology.kubernetes.io/zone": self.zone}}}

    def attempts(self) -> Iterator[Attempt]:
        """About half of all that clients could try."""
        for number, service in self.services.items():
            for port in service["ports"]:
                frontends = [("vip", f"vip{number + 1}", port["port"])]
                if "externalIPs" in service:
                    frontends.append(("ext", f"ext{number + 1}", port["port"]))
                if "ingress" in service:
                    frontends.append(("lb", f"lb{number + 1}", port["port"]))
                if "nodePort" in port:
                    frontends.append(("node port", "node", port["nodePort"]))
                for kind, to, at in frontends:
                    for client in NETWORK_OF:
                        if self.random.random() < 0.5:
                            yield Attempt(client, kind, to, at, service, port["name"], port["protocol"])

    def fate(self, attempt: Attempt) -> Fate:
        """Return the expected fate of *attempt*."""
        service = attempt.service
        (port,) = [p for p in service["ports"] if p["name"] == attempt.name]
        found = self._endpoints(service["name"], attempt.name, attempt.protocol)
        internal_local = service["internalTrafficPolicy"] == "Local"
        external_local = service.get("externalTrafficPolicy") == "Local"
        accessible = "nodePort" in port or "externalIPs" in service or "ingress" in service
        ready = {where: e for where, e in found.items() if e["ready"]}
        fallback = {w for w, e in found.items() if e.get("serving", True) and e.get("terminating")}
        cluster: set[Where] = set()
        local: set[Where] = set()
        if accessible or not internal_local:
            cluster = self._near(ready) or fallback
        if internal_local or (external_local and accessible):
            local = {w for w in ready if w[0] in HERE} or {w for w in fallback if w[0] in HERE}
        empty = not ready and not fallback
        if attempt.kind == "lb" and not _admitted(attempt):
            return Fate("dropped", empty=empty)
        if empty:
            return Fate("refused", empty=True)
        if attempt.kind == "vip":
            chosen, masqueraded = local if internal_local else cluster, attempt.client not in PODS
        elif not external_local:
            chosen, masqueraded = cluster, True
        elif attempt.client in PODS or attempt.client == "node":
            chosen, masqueraded = cluster, attempt.client == "node"
        else:
            chosen, masqueraded = local, False
        return Fate("reached", frozenset(chosen), masqueraded) if chosen else Fate("dropped")

    def _endpoints(self, service: str, name: str, protocol: str) -> dict[Where, Json]:
        """Return the endpoints of a service port, without those that get no new connections."""
        found: dict[Where, Json] = {}
        resting: dict[Where, bool] = {}
        for piece in sorted(self.slices.values(), key=lambda piece: str(piece["name"])):
            for port in piece["ports"] if piece["service"] == service else ():
                if (port["name"], port["protocol"]) == (name, protocol):
                    for endpoint in piece["endpoints"]:
                        where = endpoint["at"], port["port"]
                        if not (endpoint.get("terminating") and where in found):
                            found[where] = endpoint
                            resting[where] = piece["annotations"] == _RESTING
        return {where: endpoint for where, endpoint in found.items() if not resting[where]}

    def _near(self, ready: dict[Where, Json]) -> set[Where]:
        for hint, here in (("forNodes", NODE), ("forZones", self.zone)):
            near = {where for where, endpoint in ready.items() if here in endpoint.get(hint, ())}
            if near and all(endpoint.get(hint) for endpoint in ready.values()):
                return near
        return set(ready)

    def _service(self, number: int) -> Json:
        random = self.random
        kind = random.choice(["ClusterIP", "NodePort", "LoadBalancer", "LoadBalancer"])
        service: Json = {
            "name": f"any{number}", "type": kind, "clusterIP": f"$vip{number + 1}",
            "internalTrafficPolicy": random.choice(["Cluster", "Cluster", "Local"]),
            "ports": [{"name": f"p{at}", "port": 80 + at, "protocol": random.choice(["TCP", "UDP"])}
                      for at in range(random.randint(1, _PORTS))],
        }
        if kind != "ClusterIP":
            service["externalTrafficPolicy"] = random.choice(["Cluster", "Local"])
            if random.random() < 0.8:
                for at, port in enumerate(service["ports"]):
                    port["nodePort"] = 30000 + 10 * number + at
        if random.random() < 0.4:
            service["externalIPs"] = [f"$ext{number + 1}"]
        if kind == "LoadBalancer":
            service["ingress"] = [{"ip": f"$lb{number + 1}"}]
            if random.random() < 0.4:
                networks = ["$crowd_net", "$lan_net", "$local_pod_net", "$any_net"]
                service["loadBalancerSourceRanges"] = random.sample(networks, random.randint(1, 2))
            if service["externalTrafficPolicy"] == "Local":
                service["healthCheckNodePort"] = 31900 + number
        if random.random() < 0.4:
            service["sessionAffinity"] = "ClientIP"
        return service

    def _slice(self, number: int, piece: int) -> Json:
        random = self.random
        by_zone, by_node = random.random() < 0.5, random.random() < 0.5
        endpoints = []
        for host in random.sample(HOSTS, random.randint(0, 4)):
            endpoint: Json = {"at": host, **random.choice(_CONDITIONS)}
            if by_zone and random.random() < 0.95:
                endpoint["forZones"] = random.sample(["a", "b"], random.randint(1, 2))
            if by_node and random.random() < 0.95:
                endpoint["forNodes"] = [random.choice([NODE, "kc-node2"])]
            endpoints.append(endpoint)
        ports = [{"name": f"p{at}", "port": random.choice([8080, 8081, 8082]), "protocol": protocol}
                 for at in range(_PORTS) for protocol in ("TCP", "UDP") if random.random() < 0.9]
        return {"service": f"any{number}", "name": f"any{number}-{piece}", "ports": ports,
                "endpoints": endpoints, "annotations": random.choice(_WEIGHTS)}


def turns(attempts: Iterable[Attempt]) -> list[list[Attempt]]:
    """Group *attempts*: those of one group are made one after the other.

    Sticky attempts of a client at several frontends of a service port share a group. If two overlapped, both
    could choose an endpoint before the client is pinned. With a Local policy, one may pin the client where
    the other's frontend leads, too, and change the endpoint of its next connection, as with kube-proxy.
    """
    found: defaultdict[object, list[Attempt]] = defaultdict(list)
    for number, attempt in enumerate(attempts):
        found[attempt.affinity if attempt.sticky else number].append(attempt)
    return list(found.values())


def _admitted(attempt: Attempt) -> bool:
    ranges = attempt.service.get("loadBalancerSourceRanges", ["$any_net"])
    return "$any_net" in ranges or NETWORK_OF[attempt.client] in ranges

"""The Services and EndpointSlices of a soak, and random changes to them."""

import copy
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.switch.room import PODS

Json = dict[str, Any]

COUNT = 100
"""Services that nobody dials and that change all the time."""
_NAMESPACE = "churn"
MARK = f"{_NAMESPACE}/mark:p"
"""A service port that changes when asked to."""
_RECREATED, _REPORTED = 0.12, 0.24
"""Of all changes: Services deleted or created, and Services whose ports or policies change."""


class Change(NamedTuple):
    """One object that is written, or deleted."""

    deleted: bool
    value: Json


class Objects:
    """The objects that an API server should hold; pure but for the random numbers."""

    def __init__(self, dialled: Iterable[Json], rng: random.Random) -> None:
        """*dialled*: objects that the load uses. Only endpoints of their TCP ports change."""
        self._rng = rng
        self._held: dict[tuple[str, str, str], Json] = {}
        self._dialled = []
        for value in dialled:
            self._apply(Change(False, value))
            if value["kind"] == "EndpointSlice" and _follows(value):
                self._dialled.append(value)
        self.mark_service(0)
        self.mark_endpoints(0)
        for number in range(COUNT):
            for value in (self._service(number), *self._slices(number)):
                self._apply(Change(False, value))

    @property
    def all(self) -> list[Json]:
        """A copy of every object."""
        return [copy.deepcopy(value) for value in self._held.values()]

    def change(self) -> list[Change]:
        """Return the next random change."""
        draw = self._rng.random()
        number = self._rng.randrange(COUNT)
        service = self._service(number)
        if draw < _RECREATED and "healthCheckNodePort" not in service["spec"]:  # keeps descriptors equal
            changes = [Change(_key(service) in self._held, service)]
        elif draw < _REPORTED:
            service["spec"]["ports"][0]["port"] = self._rng.choice((80, 81, 8000))
            service["spec"]["sessionAffinity"] = self._rng.choice(("None", "ClientIP"))
            changes = [Change(False, service)]
        elif draw < 2 * _REPORTED:
            dialled = copy.deepcopy(self._rng.choice(self._dialled))
            endpoints = dialled["endpoints"]
            dialled["endpoints"] = self._rng.sample(endpoints, self._rng.randint(1, len(endpoints)))
            changes = [Change(False, dialled)]
        else:
            changes = [Change(False, value) for value in self._slices(number)]
        for change in changes:
            self._apply(change)
        return copy.deepcopy(changes)

    def mark_service(self, number: int) -> Change:
        """Change the port of `MARK`."""
        spec = {"clusterIP": "10.96.2.1", "clusterIPs": ["10.96.2.1"],
                "ports": [{"name": "p", "port": 1000 + number % 50_000, "protocol": "TCP"}]}  # fmt: skip
        return self._marked({"apiVersion": "v1", "kind": "Service", "spec": spec,
                             "metadata": {"name": "mark", "namespace": _NAMESPACE}})

    def mark_endpoints(self, number: int) -> Change:
        """Change the endpoint of `MARK`."""
        endpoint = {"addresses": [f"10.244.3.{number % 250 + 1}"], "conditions": {"ready": True}}
        return self._marked({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": "mark", "namespace": _NAMESPACE,
                         "labels": {"kubernetes.io/service-name": "mark"}},
            "endpoints": [endpoint], "ports": [{"name": "p", "port": 8080, "protocol": "TCP"}],
        })  # fmt: skip

    def _marked(self, value: Json) -> Change:
        change = Change(False, value)
        self._apply(change)
        return change

    def _apply(self, change: Change) -> None:
        key = _key(change.value)
        if change.deleted:
            del self._held[key]
        else:
            self._held[key] = copy.deepcopy(change.value)

    def _service(self, number: int) -> Json:
        protocol = "UDP" if number % 4 == 1 else "TCP"
        addresses = [f"10.96.1.{number}"] + [f"fd00:96::1:{number:x}"] * (number % 2 == 0)
        port: Json = {"name": "p", "port": 80, "protocol": protocol}
        spec: Json = {
            "type": "ClusterIP", "clusterIP": addresses[0], "clusterIPs": addresses, "ports": [port],
        }  # fmt: skip
        status: Json = {}
        if number % 5 == 0:
            spec["type"] = "NodePort"
            port["nodePort"] = 31000 + number
        if number % 9 == 0:
            spec["externalIPs"] = [f"198.51.100.{100 + number}"]
        if number % 11 == 0:
            spec |= {"type": "LoadBalancer", "externalTrafficPolicy": "Local",
                     "healthCheckNodePort": 32000 + number}
            port["nodePort"] = 31000 + number
            status = {"loadBalancer": {"ingress": [{"ip": f"198.51.101.{number}"}]}}
        return {"apiVersion": "v1", "kind": "Service", "spec": spec, "status": status,
                "metadata": {"name": f"s{number}", "namespace": _NAMESPACE}}

    def _slices(self, number: int) -> list[Json]:
        families = ("IPv4", "IPv6") if number % 2 == 0 else ("IPv4",)
        return [self._slice(number, family) for family in families]

    def _slice(self, number: int, family: str) -> Json:
        prefix = "10.244.2." if family == "IPv4" else "fd00:10:244:2::"
        hosts = self._rng.sample(range(20, 250), self._rng.choice((0, 1, 1, 2, 3, 5)))
        return {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
            "metadata": {"name": f"s{number}-{family.lower()}", "namespace": _NAMESPACE,
                         "labels": {"kubernetes.io/service-name": f"s{number}"}},
            "endpoints": [
                {"addresses": [f"{prefix}{host}"], "nodeName": self._rng.choice(("here", "elsewhere")),
                 "conditions": self._rng.choice(_CONDITIONS)}
                for host in hosts
            ],
            "ports": [{"name": "p", "port": 8080, "protocol": "UDP" if number % 4 == 1 else "TCP"}],
        }  # fmt: skip


_CONDITIONS: tuple[Json, ...] = (
    {"ready": True}, {"ready": True}, {"ready": False},
    {"ready": False, "serving": True, "terminating": True},
)  # fmt: skip


def _follows(endpoint_slice: Json) -> bool:
    """Return True if the endpoints may change under the load: TCP only, and without a local policy."""
    tcp = all(port.get("protocol", "TCP") == "TCP" for port in endpoint_slice["ports"])
    name = endpoint_slice["metadata"]["labels"]["kubernetes.io/service-name"]
    return tcp and name != "edge" and len(endpoint_slice["endpoints"]) == len(PODS)


def _key(value: Json) -> tuple[str, str, str]:
    meta = value["metadata"]
    return value["kind"], meta.get("namespace", ""), meta["name"]

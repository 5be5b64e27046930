"""Wait, from outside, until a proxy has taken up the objects that it was given.

A sentinel Service is changed after the objects of interest: it moves to a new port, and its EndpointSlices
to another endpoint. Services and EndpointSlices each reach a proxy in order, so once the sentinel's new port
leads to its new endpoint, everything before it is in effect too. A proxy may program the two IP families
separately, so the sentinel is in both.
"""

from collections.abc import Iterator

from kproxy_conformance.drivers.driver import Driver, DriverError
from kproxy_conformance.network.addresses import FAMILIES, NODE, resolve
from kproxy_conformance.network.dialing import dial, wait_until
from kproxy_conformance.network.namespaces import Namespace
from kproxy_conformance.suite.objects import Json

DEADLINE = 20.0
"""Seconds, multiplied by `patience`."""

_NAMESPACE = "kc-barrier"
_ADDRESSES = {"ipv4": "10.96.255.254", "ipv6": "fd00:96::ffff"}
_FIRST_PORT, _PORTS = 2000, 1000
_SILENCE = 0.1


class Barrier:
    """The sentinel Service of one driver."""

    def __init__(self, node: Namespace, driver: Driver, families: tuple[str, ...] = FAMILIES) -> None:
        self._node = node
        self._families = families
        self._driver = driver
        self._generation = 0

    def wait(self) -> None:
        """Return once everything applied so far is in effect in both families. Raises DriverError."""
        self._generation += 1
        port = _FIRST_PORT + self._generation % _PORTS
        endpoint = ("pod1", "pod2")[self._generation % 2]
        for obj in _objects(port, endpoint, self._families):
            self._driver.apply(obj)

        def is_passed() -> bool:
            self._driver.check()
            return all(
                dial(self._node, _ADDRESSES[family], port, timeout=_SILENCE).endpoint == endpoint
                for family in self._families
            )

        if not wait_until(is_passed, DEADLINE):
            raise DriverError(f"the proxy did not take up a change within {DEADLINE:g} s")


def _objects(port: int, endpoint: str, families: tuple[str, ...]) -> Iterator[Json]:
    addresses = [_ADDRESSES[family] for family in families]
    yield {
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "sentinel", "namespace": _NAMESPACE},
        "spec": {
            "type": "ClusterIP", "clusterIP": addresses[0], "clusterIPs": addresses,
            "ipFamilies": [family.replace("ip", "IP") for family in families],
            "ipFamilyPolicy": "RequireDualStack" if len(families) > 1 else "SingleStack",
            "ports": [{"port": port, "protocol": "TCP", "targetPort": 8080}],
        },
    }  # fmt: skip
    for family in families:
        yield {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "name": f"sentinel-{family}", "namespace": _NAMESPACE,
                "labels": {"kubernetes.io/service-name": "sentinel"},
            },
            "addressType": family.replace("ip", "IP"),
            "endpoints": [
                {"addresses": [resolve(endpoint, family)], "nodeName": NODE, "conditions": {"ready": True}}
            ],
            "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        }  # fmt: skip

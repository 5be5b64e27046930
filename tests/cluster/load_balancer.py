"""``python -m tests.cluster.load_balancer KUBECONFIG NODE...``: a load balancer before the nodes.

It gives Services addresses, and routes these to the nodes: for the policy Local, to those that say at their
health check node port that they have endpoints. It runs where the clients are.
"""

import ipaddress
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

from kubernetes import client, config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import NotFoundError

from kproxy_conformance.network.namespaces import run
from tests.cluster.fabric import REMOTE

_FINALIZER = "service.kubernetes.io/load-balancer-cleanup"
_ADDRESSES = ipaddress.ip_network("10.10.1.0/24")
_PERIOD = 0.5
"""Seconds between two looks at the Services."""
_TIMEOUT = 1.0
"""Seconds for a health check."""


class LoadBalancer:
    def __init__(self, nodes: list[str]) -> None:
        self._nodes = nodes
        self._services = DynamicClient(client.ApiClient()).resources.get(api_version="v1", kind="Service")
        self._routes: dict[str, list[str]] = {}
        """The nodes to which each address is routed."""

    def look(self) -> None:
        """Give addresses, take them back, and route them."""
        listed = [service.to_dict() for service in self._services.get().items]
        given = {_address(service) for service in listed}
        free = (str(ip) for ip in _ADDRESSES.hosts() if str(ip) not in given)
        for service in listed:
            spec, metadata = service["spec"], service["metadata"]
            finalizers = metadata.get("finalizers", [])
            address = _address(service)
            if spec["type"] != "LoadBalancer" or "deletionTimestamp" in metadata:
                if _FINALIZER in finalizers:
                    if address:
                        self._route(address, [])
                    self._patch(self._services.status, metadata, {"status": {"loadBalancer": None}})
                    self._patch(self._services, metadata, {
                        "metadata": {"finalizers": [name for name in finalizers if name != _FINALIZER]}})
                continue
            if _FINALIZER not in finalizers:
                self._patch(self._services, metadata, {"metadata": {"finalizers": [*finalizers, _FINALIZER]}})
            if not address:
                address = next(free)
                self._patch(self._services.status, metadata, {"status": {"loadBalancer": {
                    "ingress": [{"ip": address, "ipMode": "VIP"}]}}})  # fmt: skip
            port = spec.get("healthCheckNodePort")
            nodes = [node for node in self._nodes if not port or _is_healthy(node, port)]
            self._route(address, nodes[:1] if spec["sessionAffinity"] == "ClientIP" else nodes)

    def _route(self, address: str, nodes: list[str]) -> None:
        if self._routes.get(address, []) != nodes and ipaddress.ip_address(address) in _ADDRESSES:
            if nodes:
                hops = [part for node in nodes for part in ("nexthop", "via", node)]
                run("ip", "route", "replace", address, "src", REMOTE, *hops)
            else:
                run("ip", "route", "replace", "unreachable", address)
            self._routes[address] = nodes

    @staticmethod
    def _patch(resource: Any, metadata: dict[str, Any], change: dict[str, Any]) -> None:
        with suppress(NotFoundError):  # deleted meanwhile
            resource.patch(body=change, name=metadata["name"], namespace=metadata["namespace"],
                           content_type="application/merge-patch+json")  # fmt: skip


def _address(service: dict[str, Any]) -> str:
    ingress = service.get("status", {}).get("loadBalancer", {}).get("ingress") or [{}]
    return str(ingress[0].get("ip", ""))


def _is_healthy(node: str, port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{node}:{port}/healthz", timeout=_TIMEOUT) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def main() -> None:
    config.load_kube_config(sys.argv[1])
    run("sysctl", "-qw", "net.ipv4.fib_multipath_hash_policy=1")  # ports count too
    balancer = LoadBalancer(sys.argv[2:])
    while True:
        balancer.look()
        time.sleep(_PERIOD)


if __name__ == "__main__":
    main()

"""kube-proxy's rules as data (``tests/golden/iptables``), and kproxy's update for the same objects."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kproxy_conformance.builders import full_update
from kproxy_core.config.file import decode
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import Config, DetectLocalMode, resolve
from kproxy_core.contract.values import Update
from kproxy_core.kube.decode import ENDPOINT_SLICES, NODES, SERVICES
from kproxy_core.kube.store import Store
from kproxy_core.model.address import Family, parse_address
from kproxy_core.model.events import Event
from kproxy_core.model.node import LocalSource
from kproxy_core.plan.service_plan import plan_service
from kproxy_core.sync.node_facts import NodeFacts, NodeSettings
from tests.core.golden import GOLDEN

CASES = GOLDEN / "iptables"

NODE = "kc-node"
ADDRESSES = frozenset(
    parse_address(text)
    for text in (
        "127.0.0.1", "172.18.0.2", "172.18.0.22", "172.19.0.2", "10.244.1.1",
        "::1", "fd00:172:18::2", "fd00:172:18::22", "fd00:172:19::2", "fd00:10:244:1::1",
    )
)  # fmt: skip
"""Addresses of the node's interfaces in the harness's topology."""

_NODE_OBJECT: dict[str, Any] = {
    "kind": "Node",
    "metadata": {"name": NODE},
    "spec": {"podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"]},
    "status": {"addresses": [{"type": "InternalIP", "address": a} for a in ("172.18.0.2", "fd00:172:18::2")]},
}
_CONFIG = {
    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "kind": "KubeProxyConfiguration",
    "mode": "iptables",
    "clusterCIDR": "10.244.0.0/16,fd00:10:244::/48",
}
_RESOURCES: dict[str, Any] = {"Service": SERVICES, "EndpointSlice": ENDPOINT_SLICES, "Node": NODES}

_ARBITRARY = ("KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL", "KUBE-EXTERNAL-SERVICES")
"""Chains in which the order of rules for different Services is arbitrary."""
_LAST = "NOTE: this must be the last rule in this chain"


def names() -> list[str]:
    """Return all cases, each for one family."""
    return sorted(path.name for path in CASES.iterdir())


def family(case: str) -> Family:
    return Family.IPV6 if case.endswith("-ipv6") else Family.IPV4


def kube_proxys_rules(case: str) -> list[str]:
    """Return kube-proxy's rules for a case."""
    return normalised((CASES / case / "rules").read_text().splitlines())


def normalised(saved: Iterable[str]) -> list[str]:
    """Return the output of iptables-save without packet counts, sorted where the order is arbitrary.

    iptables-save prints tables in the order of their creation; they are sorted here.
    """
    tables: list[list[str]] = []
    lines: list[str] = []
    free: list[str] = []
    for line in saved:
        chain = line.split()[1] if line.startswith("-A ") else ""
        if chain in _ARBITRARY and _LAST not in line:
            free.append(line)
            continue
        if line.startswith("#"):
            continue
        lines += sorted(free)
        free = []
        lines.append(re.sub(r"\[\d+:\d+\]", "", line))
        if line == "COMMIT":
            tables.append(lines)
            lines = []
    return [line for table in sorted(tables) for line in table]


def update(case: str) -> Update:
    """Return the update that the core would give a backend for a case."""
    of = family(case)
    store = Store([of], (), started=0.0)
    settings = _node_settings(_config(CASES / case))
    for event in _events(CASES / case / "objects.yaml"):
        store.fold(event)
    facts = NodeFacts(settings, ADDRESSES)
    facts.node = store.node
    view = facts.view(of)
    plans = {
        plan.key: plan
        for name, service in store.services.items()
        for plan in plan_service(service, store.families[of].slices.get(name), view)
    }
    return full_update(view, plans)


def _config(case: Path) -> Config:
    text = yaml.safe_dump({**_CONFIG, **(yaml.safe_load((case / "config.yaml").read_text()) or {})})
    return resolve(Flags(), decode(text))


def _node_settings(given: Config) -> NodeSettings:
    local: LocalSource | tuple[Any, ...] | None = given.cluster_cidrs
    if given.detect_local_mode is DetectLocalMode.NODE_CIDR:
        local = None
    elif given.detect_local_mode is DetectLocalMode.BRIDGE_INTERFACE:
        local = LocalSource(interface=given.bridge_interface)
    return NodeSettings(
        name=NODE,
        local=local,
        node_ports=given.node_port_addresses,
        masquerade_all=given.masquerade_all,
        masquerade_bit=given.masquerade_bit,
    )


def _events(objects: Path) -> Iterator[Event]:
    for obj in (_NODE_OBJECT, *yaml.safe_load_all(objects.read_text())):
        reading = _RESOURCES[obj["kind"]].from_json(msgspec.json.encode(obj))
        yield from reading.bad
        if reading.value is not None:
            yield reading.value

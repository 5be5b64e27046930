"""Kubernetes objects from the entries of a scenario, which may be shorthands with symbols for addresses."""

import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kproxy_conformance.network.addresses import FAMILIES, NODE, OTHER_NODE, expand, node_name_of, resolve

Json = dict[str, Any]
Key = tuple[str, str, str]
"""Kind, namespace and name."""


def base_objects(families: Sequence[str] = FAMILIES) -> list[Json]:
    """Return the objects that exist in every scenario: the nodes and the service network."""
    nodes = [
        {
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "spec": {"podCIDR": cidrs[0], "podCIDRs": cidrs},
            "status": {
                "addresses": [{"type": "InternalIP", "address": resolve(symbol, f)} for f in families]
            },
        }
        for name, symbol, pods in ((NODE, "node", "local_pod_net"), (OTHER_NODE, "node2", "remote_pod_net"))
        for cidrs in [[resolve(pods, f) for f in families]]
    ]  # fmt: skip
    service_cidr = {
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": [resolve("service_net", f) for f in families]},
    }  # fmt: skip
    return [*nodes, service_cidr]


class _Symbols(dict[str, str]):
    """The addresses of all symbols in one family; unknown symbols raise ValueError."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self._family = family

    def __missing__(self, symbol: str) -> str:
        address = resolve(symbol, self._family)
        if address == symbol:
            raise ValueError(f"unknown symbol ${symbol}")
        return address


def substitute(value: Any, family: str) -> Any:
    """Return *value* with every $symbol in its strings replaced by its address."""
    if isinstance(value, str):
        return string.Template(value).substitute(_Symbols(family)) if "$" in value else value
    if isinstance(value, list | tuple):
        return [substitute(item, family) for item in value]
    if isinstance(value, Mapping):
        return {key: substitute(item, family) for key, item in value.items()}
    return value


def build(entry: Mapping[str, Any], family: str) -> Json:
    """Return the object that *entry* describes: a plain one, or a shorthand."""
    made: Json = substitute(entry, family)
    if "node" in made:
        return _node(made["node"])
    if "service" in made:
        return _service(made["service"], family)
    if "slice" in made:
        return _slice(made["slice"], family)
    if "forward" in made:
        return _forward(made["forward"], family)
    if made["kind"] not in ("Node", "ServiceCIDR", "Namespace"):
        made["metadata"].setdefault("namespace", "default")
    return made


def _metadata(short: Json) -> Json:
    found = {"name": short.pop("name"), "namespace": short.pop("namespace", "default")}
    return found | {key: short.pop(key) for key in ("labels", "annotations") if key in short}


def _service(short: Json, family: str) -> Json:
    made: Json = {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(short)}
    if "ingress" in short:
        made["status"] = {"loadBalancer": {"ingress": short.pop("ingress")}}
    made["spec"] = short
    if short.get("type") != "ExternalName":
        short.setdefault("ipFamilies", [_type_of(family)])
    for port in short.get("ports", ()):
        port.setdefault("protocol", "TCP")
    return made


def _node(short: Json) -> Json:
    name = short.get("name", NODE)
    made = next(o for o in base_objects() if o["kind"] == "Node" and o["metadata"]["name"] == name)
    made["metadata"]["labels"].update(short.get("labels", {}))
    return made


def _endpoints(entry: str | Json, family: str) -> Iterator[Json]:
    short: Json = {"at": entry} if isinstance(entry, str) else entry
    for symbol in expand([short["at"]]):
        conditions = {key: short[key] for key in ("ready", "serving", "terminating") if key in short}
        endpoint: Json = {
            "addresses": [resolve(symbol, family)], "conditions": conditions or {"ready": True},
            "nodeName": short.get("nodeName", node_name_of(symbol)),
        }  # fmt: skip
        if "zone" in short:
            endpoint["zone"] = short["zone"]
        hints = {
            key: [{"name": name} for name in short[key]] for key in ("forZones", "forNodes") if key in short
        }
        if hints:
            endpoint["hints"] = hints
        yield endpoint


def _slice(short: Json, family: str) -> Json:
    service = short["service"]
    ports = [{"port": port} if isinstance(port, int) else port for port in short.get("ports", [8080])]
    return {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": short.get("name", f"{service}-1"), "namespace": short.get("namespace", "default"),
            "labels": {"kubernetes.io/service-name": service},
            **({"annotations": short["annotations"]} if "annotations" in short else {}),
        },
        "addressType": short.get("addressType", _type_of(family)),
        "endpoints": [e for entry in short.get("endpoints", ()) for e in _endpoints(entry, family)],
        "ports": [{"name": "", "protocol": "TCP", **port} for port in ports],
    }  # fmt: skip


def _forward(short: Json, family: str) -> Json:
    def sockets(texts: list[str]) -> list[str]:
        """Return *texts* with addresses for symbols; ``node`` is a word of Forwards here."""
        pairs = [text.split(":", 1) for text in texts]
        return [f"{host if host == 'node' else _in_brackets(resolve(host, family))}:{rest}"
                for host, rest in pairs]

    return {"apiVersion": "kproxy.dev/v1", "kind": "Forward", **short,
            "listen": sockets(short["listen"]), "to": sockets(short["to"])}


def _in_brackets(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _type_of(family: str) -> str:
    return family.replace("ip", "IP")


def reference(text: str) -> Json:
    """Return kind and metadata of the object that ``Kind/[namespace/]name`` refers to."""
    kind, *path = text.split("/")
    namespace = path[0] if len(path) == 2 else "default"
    return {"kind": kind, "metadata": {"name": path[-1], "namespace": namespace}}


def key_of(obj: Mapping[str, Any]) -> Key:
    """Return the key of *obj*. A Forward, which has no metadata, has that of `reference`."""
    meta = obj.get("metadata") or {"namespace": "default", "name": obj["name"]}
    return obj["kind"], meta.get("namespace", ""), meta["name"]

"""Deterministic sets of Kubernetes objects: N Services with E endpoints each.

Also their EndpointSlices (at most 100 endpoints each, as the EndpointSlice controller makes them), the Nodes
and the ServiceCIDR. The same options and seed always give the same objects.

Address plan (everything is private to the network namespace of a measurement):
  10.96.0.0/12    ClusterIPs
  10.128.0.0/10   pod (endpoint) addresses; 10.128.0.1 is the client pod
  10.192.0.0/10   addresses that only incremental changes bring in
  198.18.0.0/15   LoadBalancer ingress addresses
  192.0.2.0/24    node addresses
"""

import dataclasses
import ipaddress
import json
import random
from pathlib import Path
from typing import Any, Self

import yaml

Json = dict[str, Any]
Objects = dict[str, list[Json]]
"""By the plural of their resource."""

NODE = "kb-node-0"          # the node that the measured proxy runs on
NODE_COUNT = 100
SERVICE_CIDR = "10.96.0.0/12"
CLUSTER_CIDR = "10.128.0.0/9"
CLIENT_POD = "10.128.0.1"
TARGET_PORT = 8080
MAX_PER_SLICE = 100
STAMP = "2026-01-01T00:00:00Z"

_SVC0 = int(ipaddress.ip_address("10.96.0.10"))
_POD0 = int(ipaddress.ip_address("10.128.1.0"))
_LB0 = int(ipaddress.ip_address("198.18.0.1"))


@dataclasses.dataclass
class Options:
    """The number of Services, and the share of them that is of some kind."""

    services: int = 100
    endpoints: int = 5
    nodeport: float = 0.0       # fraction of Services of type NodePort
    loadbalancer: float = 0.0   # fraction of Services of type LoadBalancer
    affinity: float = 0.0       # fraction with sessionAffinity: ClientIP
    udp: float = 0.0            # fraction whose port is UDP instead of TCP
    local_policy: float = 0.0   # fraction of the externally reachable ones with
    #                             externalTrafficPolicy: Local
    empty: float = 0.0          # fraction without any endpoint
    slice_size: int = MAX_PER_SLICE
    managed_fields: bool = False
    seed: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``services=1000,endpoints=5,nodeport=0.1``. Raises ValueError."""
        opts = cls()
        types = {field.name: type(getattr(cls, field.name)) for field in dataclasses.fields(cls)}
        for item in filter(None, text.split(",")):
            key, value = item.split("=", 1)
            key = key.strip().replace("-", "_")
            if key not in types:
                raise ValueError(f"unknown option {key!r}")
            kind = types[key]
            setattr(opts, key, value.lower() in ("1", "true", "yes") if kind is bool else kind(value))
        return opts


def ip(n: int) -> str:
    return str(ipaddress.ip_address(n))


def _uid(kind: int, n: int) -> str:
    return f"{kind:08x}-0000-4000-8000-{n:012x}"


def _managed(manager: str, fields: dict[str, list[str]]) -> list[Json]:
    return [{"manager": manager, "operation": "Update", "apiVersion": "v1", "time": STAMP,
             "fieldsType": "FieldsV1",
             "fieldsV1": {f: {"f:" + k: {} for k in keys} for f, keys in fields.items()}}]


def service_name(i: int) -> tuple[str, str]:
    """Return namespace and name of Service number *i*; 50 Services share a namespace."""
    return f"bench-{i // 50:04d}", f"svc-{i:06d}"


def slice_name(service: str, part: int) -> str:
    return f"{service}-{part:03d}"


def make_nodes() -> list[Json]:
    return [
        {
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": f"kb-node-{i}", "uid": _uid(1, i), "creationTimestamp": STAMP,
                         "labels": {"kubernetes.io/hostname": f"kb-node-{i}", "kubernetes.io/os": "linux",
                                    "topology.kubernetes.io/zone": f"zone-{i % 3}"}},
            "spec": {"podCIDR": f"10.{128 + i // 4}.{(i % 4) * 64}.0/18",
                     "podCIDRs": [f"10.{128 + i // 4}.{(i % 4) * 64}.0/18"]},
            "status": {"addresses": [{"type": "InternalIP", "address": f"192.0.2.{i + 1}"},
                                     {"type": "Hostname", "address": f"kb-node-{i}"}],
                       "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady",
                                       "message": "", "lastHeartbeatTime": STAMP,
                                       "lastTransitionTime": STAMP}],
                       "nodeInfo": {"architecture": "amd64", "operatingSystem": "linux", "bootID": "",
                                    "machineID": "", "systemUUID": "", "kernelVersion": "", "osImage": "",
                                    "containerRuntimeVersion": "", "kubeletVersion": "v1.36.2",
                                    "kubeProxyVersion": ""}},
        } for i in range(NODE_COUNT)
    ]


def make_endpoint(address: str, number: int) -> Json:
    """Return endpoint *number*, which decides its node; one in NODE_COUNT is local to NODE."""
    node = number % NODE_COUNT
    return {"addresses": [address],
            "conditions": {"ready": True, "serving": True, "terminating": False},
            "nodeName": f"kb-node-{node}", "zone": f"zone-{node % 3}",
            "targetRef": {"kind": "Pod", "namespace": "bench", "name": f"pod-{number:07d}",
                          "uid": _uid(5, number)}}


def generate(opts: Options) -> Objects:
    rng = random.Random(opts.seed)
    services: list[Json] = []
    slices: list[Json] = []
    next_pod = next_lb = 0
    next_nodeport, last_nodeport = 30000, 32767
    for i in range(opts.services):
        namespace, name = service_name(i)
        # one draw per option and Service, so that changing one fraction leaves the rest alone
        draw = [rng.random() for _ in range(6)]
        kind = ("LoadBalancer" if draw[0] < opts.loadbalancer
                else "NodePort" if draw[0] < opts.loadbalancer + opts.nodeport else "ClusterIP")
        protocol = "UDP" if draw[1] < opts.udp else "TCP"
        cluster_ip = ip(_SVC0 + i)
        port: Json = {"name": "main", "port": 80, "targetPort": TARGET_PORT, "protocol": protocol}
        spec: Json = {"type": kind, "clusterIP": cluster_ip, "clusterIPs": [cluster_ip],
                "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack", "internalTrafficPolicy": "Cluster",
                "sessionAffinity": "None", "selector": {"app": name}, "ports": [port]}
        status: Json = {"loadBalancer": {}}
        if draw[2] < opts.affinity:
            spec["sessionAffinity"] = "ClientIP"
            spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": 10800}}
        if kind != "ClusterIP":
            spec["externalTrafficPolicy"] = "Local" if draw[3] < opts.local_policy else "Cluster"
            if next_nodeport <= last_nodeport:
                port["nodePort"] = next_nodeport
                next_nodeport += 1
            elif kind == "NodePort":
                raise ValueError("more NodePort Services than there are node ports")
            else:
                spec["allocateLoadBalancerNodePorts"] = False
        if kind == "LoadBalancer":
            status["loadBalancer"] = {"ingress": [{"ip": ip(_LB0 + next_lb), "ipMode": "VIP"}]}
            next_lb += 1
        meta: Json = {"name": name, "namespace": namespace, "uid": _uid(2, i), "creationTimestamp": STAMP,
                "labels": {"app": name, "bench": "true"}}
        if opts.managed_fields:
            meta["managedFields"] = _managed("kube-controller-manager", {"f:metadata": ["labels", "name"],
                                             "f:spec": sorted(spec)})
        services.append(
            {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec, "status": status}
        )

        count = 0 if draw[4] < opts.empty else opts.endpoints
        for part, start in enumerate(range(0, max(count, 1), opts.slice_size)):
            number = min(opts.slice_size, count - start)
            endpoints = [make_endpoint(ip(_POD0 + next_pod + k), next_pod + k) for k in range(number)]
            next_pod += number
            meta = {"name": slice_name(name, part), "namespace": namespace, "uid": _uid(3, len(slices)),
                    "generateName": name + "-", "generation": 1, "creationTimestamp": STAMP,
                    "labels": {"endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                               "kubernetes.io/service-name": name, "app": name},
                    "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": name,
                                         "uid": _uid(2, i),
                                         "controller": True, "blockOwnerDeletion": True}]}
            if opts.managed_fields:
                meta["managedFields"] = _managed("kube-controller-manager",
                                                 {"f:metadata": ["labels", "ownerReferences"],
                                                  ".": ["addressType", "endpoints", "ports"]})
            slices.append({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": meta,
                           "addressType": "IPv4", "endpoints": endpoints,
                           "ports": [{"name": "main", "port": TARGET_PORT, "protocol": protocol}]})
    cidr = {"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
            "metadata": {"name": "kubernetes", "uid": _uid(4, 0), "creationTimestamp": STAMP},
            "spec": {"cidrs": [SERVICE_CIDR]}, "status": {}}
    return {"nodes": make_nodes(), "servicecidrs": [cidr], "services": services, "endpointslices": slices}


def read(directory: Path) -> Objects:
    """Return the objects of every .json and .yaml file in *directory*, of Lists too."""
    plural = {
        "Node": "nodes", "Service": "services", "EndpointSlice": "endpointslices",
        "ServiceCIDR": "servicecidrs",
    }  # fmt: skip
    found: Objects = {name: [] for name in plural.values()}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".json":
            documents = [json.loads(path.read_text())]
        elif path.suffix in (".yaml", ".yml"):
            documents = list(yaml.safe_load_all(path.read_text()))
        else:
            continue
        for document in documents:
            for obj in document["items"] if document.get("kind", "").endswith("List") else [document]:
                if obj.get("kind") in plural:
                    found[plural[obj["kind"]]].append(obj)
    return found

"""The API server's objects that tell where a packet goes, each with the time of its last change. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct, field

from kproxy_core.kube.decode import ENDPOINT_SLICES, SERVICES
from kproxy_core.model.address import Address, format_address, parse_address
from kproxy_core.model.events import ServiceSet, SliceSet
from kproxy_core.model.service import EndpointSlice, Service, ServiceName
from kproxy_core.plan.service_plan import Frontend

TRIGGER_TIME = "endpoints.kubernetes.io/last-change-trigger-time"


class _Object(Struct, frozen=True, rename="camel"):
    pass


class _ManagedFields(_Object, frozen=True):
    time: str | None = None


class Metadata(_Object, frozen=True):
    """The parts of meta/v1 ObjectMeta that are read."""

    name: str = ""
    namespace: str | None = None
    resource_version: str = ""
    creation_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    managed_fields: list[_ManagedFields] | None = None

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    @property
    def created(self) -> float | None:
        """Seconds since the epoch; None: not told."""
        return _time(self.creation_timestamp)

    @property
    def changed(self) -> float | None:
        """Time of the last change by its managed fields, else by the annotation of a slice; None: unknown.

        In seconds since the epoch. A creation is no such time: changes may have followed.
        """
        times = [_time(fields.time) for fields in self.managed_fields or ()]
        known = [time for time in times if time is not None]
        return max(known) if known else _time((self.annotations or {}).get(TRIGGER_TIME))


def _time(text: str | None) -> float | None:
    with suppress(ValueError, OverflowError):
        found = datetime.fromisoformat(text or "")
        return found.timestamp() if found.tzinfo is not None else None
    return None


class _HasMetadata(_Object, frozen=True):
    metadata: Metadata = Metadata()


# Services and their slices, read as the proxies of the nodes read them.


class _ServiceSpec(_Object, frozen=True):
    selector: dict[str, str] | None = None


class _Service(_Object, frozen=True):
    metadata: Metadata = Metadata()
    spec: _ServiceSpec = _ServiceSpec()


class ServiceState(NamedTuple):
    """A Service as the API server has it."""

    meta: Metadata
    service: Service | None
    """None: no service proxy serves it, because it is headless, an ExternalName, or of another proxy."""
    selector: str = ""
    """The labels of its pods, as a query has them; "": it selects none."""

    @classmethod
    def read(cls, data: bytes | Raw) -> "ServiceState":
        reading = SERVICES.from_json(data)
        served = reading.value.service if isinstance(reading.value, ServiceSet) else None
        decoded = msgspec.json.decode(data, type=_Service)
        selector = ",".join(f"{key}={value}" for key, value in (decoded.spec.selector or {}).items())
        return cls(decoded.metadata, served, selector)

    def has(self, frontend: Frontend, node_addresses: Collection[Address]) -> bool:
        """Return whether *frontend* is one of its own. *node_addresses* have node ports."""
        service = self.service
        if service is None:
            return False
        own = {*service.cluster_ips, *service.external_ips, *service.load_balancer_ips}
        on_node = frontend.address is None or frontend.address in node_addresses
        return any(
            port.protocol is frontend.protocol and (
                (frontend.address in own and port.port == frontend.port)
                or (on_node and port.node_port == frontend.port))
            for port in service.ports
        )  # fmt: skip


class _Reference(_Object, frozen=True):
    kind: str = ""
    name: str = ""
    namespace: str = ""


class _Endpoint(_Object, frozen=True):
    addresses: list[str] | None = None
    target_ref: _Reference | None = None


class _Endpoints(_Object, frozen=True):
    endpoints: list[_Endpoint] | None = None


class SliceState(NamedTuple):
    """An EndpointSlice as the API server has it."""

    meta: Metadata
    slice: EndpointSlice
    pods: Mapping[str, ServiceName]
    """Namespace and name of the pods behind its addresses, as far as it names them."""

    @classmethod
    def read(cls, data: bytes | Raw) -> "SliceState | None":
        """None: no service proxy uses it."""
        reading = ENDPOINT_SLICES.from_json(data)
        if not isinstance(reading.value, SliceSet):
            return None
        piece = reading.value.slice
        pods = dict(_pods(msgspec.json.decode(data, type=_Endpoints), piece.name.namespace))
        return cls(msgspec.json.decode(data, type=_HasMetadata).metadata, piece, pods)


def _pods(slice_: _Endpoints, namespace: str) -> Iterator[tuple[str, ServiceName]]:
    for endpoint in slice_.endpoints or ():
        to = endpoint.target_ref
        if to is not None and to.kind == "Pod" and endpoint.addresses:
            with suppress(ValueError):
                address = format_address(parse_address(endpoint.addresses[0]))
                yield address, ServiceName(to.namespace or namespace, to.name)


# Pods, and the NetworkPolicies that select them.


class _PodSpec(_Object, frozen=True):
    node_name: str | None = None
    host_network: bool | None = None


class _PodIP(_Object, frozen=True):
    ip: str | None = None


class _PodStatus(_Object, frozen=True):
    phase: str | None = None
    pod_ip: str | None = field(default=None, name="podIP")
    pod_ips: list[_PodIP] | None = field(default=None, name="podIPs")


class Pod(_Object, frozen=True):
    """v1 Pod."""

    metadata: Metadata = Metadata()
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def node(self) -> str:
        """"": not scheduled."""
        return self.spec.node_name or ""

    @property
    def is_on_host_network(self) -> bool:
        return bool(self.spec.host_network)

    @property
    def has_ended(self) -> bool:
        """Its address may be another pod's."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def addresses(self) -> tuple[Address, ...]:
        found: dict[Address, None] = {}
        for text in (self.status.pod_ip, *(each.ip for each in self.status.pod_ips or ())):
            with suppress(ValueError):
                found[parse_address(text or "")] = None
        return tuple(found)


class _Requirement(_Object, frozen=True):
    key: str
    operator: str
    values: list[str] | None = None


class LabelSelector(_Object, frozen=True):
    """meta/v1 LabelSelector. An empty one selects everything."""

    match_labels: dict[str, str] | None = None
    match_expressions: list[_Requirement] | None = None

    def selects(self, labels: Mapping[str, str]) -> bool:
        own = self.match_labels or {}
        return own.items() <= labels.items() and all(
            _meets(labels, requirement) for requirement in self.match_expressions or ())


def _meets(labels: Mapping[str, str], required: _Requirement) -> bool:
    """Whether *labels* meet a requirement (k8s.io/apimachinery, pkg/labels: NotIn also without the key)."""
    match required.operator:
        case "In":
            return labels.get(required.key) in (required.values or ())
        case "NotIn":
            return labels.get(required.key) not in (required.values or ())
        case "Exists":
            return required.key in labels
        case "DoesNotExist":
            return required.key not in labels
    return False


class _PolicySpec(_Object, frozen=True):
    pod_selector: LabelSelector = LabelSelector()
    policy_types: list[str] | None = None
    egress: list[object] | None = None


class NetworkPolicy(_Object, frozen=True):
    """networking.k8s.io/v1 NetworkPolicy, without its rules."""

    metadata: Metadata = Metadata()
    spec: _PolicySpec = _PolicySpec()

    def is_about(self, direction: str) -> bool:
        """*direction*: Ingress or Egress. Without policyTypes, egress rules make it one of both."""
        if self.spec.policy_types:
            return direction in self.spec.policy_types
        return direction == "Ingress" or bool(self.spec.egress)


def selecting(policies: Iterable[NetworkPolicy], pod: Pod, direction: str) -> list[str]:
    """Return the names of the *policies* for *direction* that select *pod*, in order.

    None select a pod in the node's network namespace: what they mean for such pods is undefined.
    """
    if pod.is_on_host_network:
        return []
    labels = pod.metadata.labels or {}
    return sorted(
        policy.metadata.name for policy in policies
        if policy.metadata.namespace == pod.metadata.namespace and policy.is_about(direction)
        and policy.spec.pod_selector.selects(labels)
    )  # fmt: skip

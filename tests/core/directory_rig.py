"""A directory of manifests, followed for real, and short ways to write objects into it."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kproxy_conformance.builders import service_name
from kproxy_core.kube.directory import GRACE, DirectorySource
from kproxy_core.kube.store import Store
from kproxy_core.model.address import Family, format_address
from kproxy_core.model.events import BadObject, Event
from kproxy_core.model.service import ServiceName
from tests.patience import PATIENCE

Json = dict[str, Any]
NODE = "node1"


def service(name: str = "web", ip: str = "10.96.0.1", port: int = 80, **spec: object) -> Json:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"clusterIP": ip, "ports": [{"port": port}]} | spec}


def endpoint_slice(service: str = "web", *addresses: str, name: str = "", **content: object) -> Json:
    return {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": name or f"{service}-1", "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4", "ports": [{"port": 8080}],
            "endpoints": [{"addresses": [address]} for address in addresses]} | content


def endpoints(service: str = "web", *addresses: str) -> Json:
    return {"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": service},
            "subsets": [{"addresses": [{"ip": ip} for ip in addresses], "ports": [{"port": 8080}]}]}


def node(name: str = NODE, zone: str = "") -> Json:
    return {"apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}}}


def service_cidr(name: str, *cidrs: str) -> Json:
    return {"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": name},
            "spec": {"cidrs": cidrs}}


def text(*objects: Json) -> str:
    """A YAML file with *objects*, one document each."""
    return "# manifests\n" + "".join(f"---\n{json.dumps(value)}\n" for value in objects)


class State:
    """The state of a store after all events so far; safe to read from any thread."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._changed = threading.Condition()
        self.store = Store(Family, DirectorySource.kinds, started=0.0)
        self.bad: list[BadObject] = []
        self.batches: list[list[Event]] = []
        self.emit(list(events))

    def emit(self, events: list[Event]) -> None:
        with self._changed:
            self.batches.append(events)
            for event in events:
                self.store.fold(event)
                if isinstance(event, BadObject):
                    self.bad.append(event)
            self._changed.notify_all()

    def wait(self, until: Callable[["State"], object]) -> None:
        """Return once *until* holds."""
        with self._changed:
            if not self._changed.wait_for(lambda: until(self), PATIENCE):
                raise AssertionError(f"it never came to that; services: {self.services}, bad: {self.bad}")

    @contextmanager
    def holding_up(self) -> Iterator[None]:
        """Accept no events inside, so that the source waits."""
        with self._changed:
            yield

    @property
    def services(self) -> dict[str, int]:
        """The Services and their first port."""
        return {name.name: found.ports[0].port for name, found in self.store.services.items()}

    def endpoints(self, service: str = "web") -> set[str]:
        """The addresses of all endpoints of *service*."""
        name: ServiceName = service_name(service)
        return {
            format_address(endpoint.address)
            for family in Family
            for piece in (self.store.families[family].slices.get(name) or {}).values()
            for endpoint in piece.endpoints
        }

    @property
    def complaints(self) -> list[str]:
        return [str(bad) for bad in self.bad]


def serving(**services: int) -> Callable[[State], bool]:
    """Exactly these Services are there, with these ports."""
    return lambda state: state.services == services


@contextmanager
def followed(
    directory: Path, grace: float = GRACE, report: Callable[[str], None] = lambda _: None
) -> Iterator[State]:
    """The state that follows *directory* as it changes."""
    state = State()
    source = DirectorySource(directory, NODE, grace=grace, report=report)
    source.start(state.emit)
    try:
        yield state
    finally:
        source.stop()


def wait_past_everything(state: State, directory: Path) -> None:
    """Return once all that was done to the directory before has had its effect, if any.

    A removal is the change that takes longest, so one more of them is the last to be seen.
    """
    last = directory / "zz-last.yaml"
    last.write_text(text(service("zz-last", ip="10.96.255.1")))
    state.wait(lambda s: "zz-last" in s.services)
    last.unlink()
    state.wait(lambda s: "zz-last" not in s.services)

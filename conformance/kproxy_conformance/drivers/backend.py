"""A backend in this process, on the node of the topology, driven by kproxy's own loop.

The loop has a thread in the node's network namespace, so all that the backend creates belongs to the node,
and damage is repaired while a scenario waits. Breakpoints and coverage work as in any test.
"""

import json
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from kproxy_conformance.checks.kernel_state import stop_translating, translate_addresses
from kproxy_conformance.drivers.driver import (
    NO_OPTIONS,
    Connections,
    Driver,
    DriverError,
    Options,
    Unavailable,
)
from kproxy_conformance.network.addresses import NODE, resolve
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.suite.objects import Json, base_objects, key_of
from kproxy_conformance.suite.scenario import BACKEND
from kproxy_core.app.answers import cases_of, explain_cases, snapshots
from kproxy_core.app.requests import Explain, parse_texts
from kproxy_core.config.file import decode
from kproxy_core.config.flags import Flags
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import Leftovers
from kproxy_core.kube.directory import Inventory, read_manifest
from kproxy_core.kube.store import Store
from kproxy_core.linux.addresses import AddressWatch
from kproxy_core.model.address import Family, format_address
from kproxy_core.modes.settings import Configuration, backend_settings, node_settings, pacing
from kproxy_core.modes.switch import start_backend
from kproxy_core.sync.flows import CleanupResult, EarlyConnections, FlowCleaner, StaleFlowObserver
from kproxy_core.sync.loop import Loop
from kproxy_core.sync.node_facts import NodeFacts
from kproxy_core.sync.node_port_relays import NodePortRelays, by_timer
from kproxy_core.sync.resets import ConnectionResets, clean_up_resets

_FAMILIES = tuple(Family)


class BackendDriver(Driver):
    """The loop, the store and the deletion of stale flows around one backend."""

    name = BACKEND

    def __init__(
        self, topology: Topology, directory: Path, plugins: Sequence[str] = (), options: Options = NO_OPTIONS
    ) -> None:
        """*plugins*: as ``kproxy -p`` takes them."""
        super().__init__(topology, directory, options)
        self.registry = Registry(plugins=tuple(plugins))
        self._objects = {key_of(obj): obj for obj in base_objects(self.families)}
        # One of each for all loops, because their threads do not end.
        self._cleaner = FlowCleaner(self._flows_cleaned)
        self._early = EarlyConnections(lambda family, deleted, seconds: None)
        self._relays = NodePortRelays(
            lambda service, problem: None, lambda family, problem: None, self._post, by_timer(self._post))
        self._mode = ""
        self._instance: BackendInstance | None = None
        self._loop: Loop | None = None
        self._problem = ""
        self._is_succeeded = False

    def apply(self, obj: Json) -> None:
        self._objects[key_of(obj)] = obj
        self._emit([obj])

    def delete(self, obj: Mapping[str, Any]) -> None:
        if self._objects.pop(key_of(obj), None) is not None and self._loop is not None:
            self._loop.emit(self._inventory.apply({_file_of(obj): None}))

    def _emit(self, objects: Sequence[Json]) -> None:
        if self._loop is not None:
            files = {_file_of(obj): read_manifest(_file_of(obj), json.dumps(obj).encode()) for obj in objects}
            self._loop.emit(self._inventory.apply(files))

    def _start(self, mode: str, config: Mapping[str, Any] | None) -> None:
        complete = {**self.complete_config(mode, config), "hostnameOverride": NODE}
        configuration = Configuration(Flags(), decode(yaml.safe_dump(complete)))
        self._mode, self._config = mode, configuration.of(mode)
        self._backend_settings = backend_settings(self._config, _FAMILIES)
        self._problem = ""
        with self.node.entered():
            if self._is_succeeded:
                stop_translating()
                self._is_succeeded = False
            self._instance = start_backend(self.registry, mode, self._backend_settings)
            flows = StaleFlowObserver(_FAMILIES, self._cleaner.clean)
            self._finish_flows = flows.finish
            self._inventory = Inventory(NODE)
            self._loop = Loop(
                _FAMILIES,
                Store(_FAMILIES, (), time.time(), last_resort=self._config.kproxy.last_resort_seconds),
                NodeFacts(node_settings(self._config, self.registry.load(mode)), frozenset()),
                self._instance,
                pacing=lambda: pacing(self._config), clock=time.monotonic, cpu=time.thread_time,
            )  # fmt: skip
            self._loop.observe([self._relays, flows, self._early, ConnectionResets(
                _FAMILIES, lambda _: None, relayed=self._relays.reset_connections)])
            self._watch = AddressWatch(self._loop.set_addresses, self.registry.is_of_node)
            self._loop.set_addresses(self._watch.addresses)
            self._emit(list(self._objects.values()))
            self._thread = threading.Thread(
                target=self._run, args=(self._loop,), name="kproxy-loop", daemon=True
            )
            self._thread.start()

    def _run(self, loop: Loop) -> None:
        try:
            loop.run()
        except Exception:  # noqa: BLE001 - whatever a backend raises is told where the scenario is played
            self._problem = traceback.format_exc()

    def _post(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            self._loop.post(call)

    def _flows_cleaned(self, result: CleanupResult) -> None:
        if self._loop is not None:
            self._loop.post(partial(self._finish_flows, result))

    @property
    def is_running(self) -> bool:
        return self._loop is not None and not self._problem

    def check(self) -> None:
        if self._problem:
            raise DriverError(f"the loop ended:\n{self._problem}")

    def counted(self, family: str) -> Connections:
        assert self._instance is not None
        with self.node.entered():
            found = self._instance.traffic(Family(family.replace("ip", "IP")))
        if found is None:
            raise Unavailable("the backend does not count connections")
        sums: Counter[tuple[str, str, int, str]] = Counter()
        for (address, protocol, port), where, number, *_ in found:
            dialled = format_address(address) if address is not None else resolve("node", family)
            endpoint = format_address(where.address) if where is not None else ""
            sums[protocol.name.lower(), dialled, port, endpoint] += number
        return sums

    def explained(self, requests: Sequence[Mapping[str, str]]) -> list[Json] | None:
        """As the base's. The kernel is read once for all *requests*."""
        if self._loop is None or self._instance is None:
            return None
        plans = snapshots(self._loop, self._relays.problem)
        with self.node.entered():
            asked = [parse_texts(Explain, request) for request in requests]
            cases = [case for one in asked for case in cases_of(one, plans, self._instance, live=True)]
            return explain_cases(cases, self._instance, [()] * len(cases), live=True)

    def announced(self) -> str:
        if self._loop is None or self._problem:
            return ""
        node = node_settings(self._config, self.registry.load(self._mode))
        with self.node.entered():
            caveats = [
                caveat for update in self._loop.call(partial(self._loop.updates, node))
                for caveat in self.registry.caveats(self._mode, update, self._backend_settings)
            ]  # fmt: skip
        return "; ".join(dict.fromkeys(caveat.what for caveat in caveats if caveat.lost))

    def retire(self) -> Leftovers:
        with self.node.entered():
            if self._loop is not None:
                self._end_loop()
                translate_addresses()  # as the mode that serves next
                self._is_succeeded = True
            left = Leftovers.merged([
                self.registry.retire(
                    layer, self._backend_settings, instance=self._instance if layer == self._mode else None
                )
                for layer in reversed(self.registry.layers(self._mode))
            ], self._mode)  # fmt: skip
            if left.errors:
                raise DriverError(f"kproxy_retire: {'; '.join(left.errors)}")
        if not left.is_needed:
            self.stop()
            self.cleanup()
        return left

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """Close the backend. *with_signal* makes no difference within a process."""
        if self._loop is not None:
            self._end_loop()
        if self._instance is not None:
            with self.node.entered():
                self._instance.close()
            self._instance = None

    def _end_loop(self) -> None:
        assert self._loop is not None
        loop, self._loop = self._loop, None
        loop.stop()
        self._thread.join()
        self._watch.close()
        self._relays.close()

    def cleanup(self) -> None:
        with self.node.entered():
            layers = reversed(self.registry.layers(self._mode))
            for left in (clean_up_resets(dry_run=False), *(
                self.registry.cleanup(layer, self._backend_settings, dry_run=False) for layer in layers)):
                if left.errors:
                    raise DriverError(f"kproxy_cleanup: {'; '.join(left.errors)}")


def _file_of(obj: Mapping[str, Any]) -> str:
    return "_".join(key_of(obj)) + ".json"

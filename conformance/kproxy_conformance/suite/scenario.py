"""Scenario files, as far as they say where they apply."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from kproxy_conformance.network.addresses import FAMILIES, LOCAL
from kproxy_conformance.network.wiring import Reach, Wiring

SCENARIOS = Path(__file__).parents[1] / "scenarios"
"""The scenarios that every proxy is played."""

BACKEND = "backend"
"""The driver that plays with a backend in this process."""

Step = Mapping[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C reads all scenarios in 20 ms, the other in 230."""
_LOCAL_PODS = set(LOCAL) - {"node"}
_KEYS = {"description", "objects", "steps", "config", "modes", "families", "drivers", "oracle", "devices"}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario: objects, and steps that change them and send packets."""

    name: str
    description: str
    objects: tuple[Step, ...] = ()
    """Applied first."""
    steps: tuple[Step, ...] = ()
    config: Mapping[str, Any] | None = None
    """Merged into the KubeProxyConfiguration."""
    modes: tuple[str, ...] = ()
    """Empty: every mode."""
    families: tuple[str, ...] = FAMILIES
    drivers: tuple[str, ...] = ()
    """Empty: every driver."""
    oracle_differs: str = ""
    """Why kube-proxy is known to fail it."""
    devices: tuple[str, ...] = ()
    """Devices of the node that it names: wirings without them cannot play it."""

    @property
    def process_need(self) -> str:
        """What a step does that only a whole proxy allows; "" if there is no such step."""
        return _process_need(self.steps)

    def unsuitable_for(self, mode: str, family: str, driver: str) -> str:
        """Return why the scenario does not apply; "" if it does."""
        return self.not_for(mode, family) or self.unplayable_by(driver)

    def not_for(self, mode: str, family: str) -> str:
        """Return why the scenario does not apply, whatever the driver; "" if it does."""
        if self.modes and mode not in self.modes:
            return f"not for mode {mode}"
        return "" if family in self.families else f"not for {family}"

    def unplayable_by(self, driver: str) -> str:
        """Return why *driver* plays the scenario in no mode; "" if it plays it."""
        if self.drivers and driver not in self.drivers:
            return f"only for driver {', '.join(self.drivers)}"
        if driver == BACKEND and self.process_need:
            return f"{self.process_need}, so only the drivers of a whole kproxy play it"
        if self.oracle_differs and driver == "kube-proxy":
            return f"kube-proxy differs: {self.oracle_differs}"
        return ""

    @property
    def _reached(self) -> frozenset[Reach]:
        endpoints = {*_endpoints(self.objects), *_endpoints(self.steps)}
        return frozenset(_reached(self.steps, endpoints))

    def unplayable_in(self, wiring: Wiring, mode: str, family: str) -> str:
        """Return why the scenario cannot be played in *wiring*; "" if it can."""
        if missing := sorted(set(self.devices) - wiring.devices):
            return f"wiring {wiring.name} has no device {', '.join(missing)}"
        return wiring.lacking(self.name, mode, family, self._reached)


def _reached(steps: Sequence[Step], endpoints: Iterable[str]) -> Iterator[Reach]:
    """Yield what pods of the node reach in *steps*: any of *endpoints* where a step does not say."""
    for step in steps:
        if "repeat" in step:
            yield from _reached(step["repeat"]["steps"], endpoints)
        expect = step.get("expect", {"reaches": endpoints})
        ends = expect.get("reaches", endpoints) if isinstance(expect, Mapping) else ()
        pods = _LOCAL_PODS & {str(end).partition(":")[0] for end in ends}
        for spec in (step[action] for action in ("probe", "open", "traffic") if action in step):
            if spec["from"] in pods:
                yield "itself"
            if spec["from"] in _LOCAL_PODS and pods - {spec["from"]}:
                yield "neighbour"


def _endpoints(entries: Iterable[Step]) -> Iterator[str]:
    """Yield the symbols of all endpoints in *entries*: objects, or steps that apply some."""
    for entry in entries:
        yield from _endpoints(entry.get("apply", ()))
        for endpoint in entry.get("slice", {}).get("endpoints", ()):
            yield endpoint if isinstance(endpoint, str) else endpoint["at"]


def _process_need(steps: Iterable[Step]) -> str:
    for step in steps:
        if BACKEND not in step.get("drivers", (BACKEND,)):
            continue
        proxy = step.get("proxy")
        if "repeat" in step and (need := _process_need(step["repeat"]["steps"])):
            return need
        if "http" in step:
            return "asks for pages of the process"
        if proxy == "kill":
            return "kills the process"
        if isinstance(proxy, Mapping) and "mode" in proxy:
            return "starts a second mode"
    return ""


def read(path: Path) -> Scenario:
    """Read a scenario file. Raises ValueError, with the path, for one that is malformed."""
    body = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    if unknown := sorted(body.keys() - _KEYS):
        raise ValueError(f"{path}: unknown keys {', '.join(unknown)}")
    try:
        description = " ".join(body["description"].split())
    except KeyError:
        raise ValueError(f"{path}: no description") from None
    return Scenario(
        path.stem, description, tuple(body.get("objects") or ()), tuple(body.get("steps") or ()),
        body.get("config"), tuple(body.get("modes") or ()), tuple(body.get("families") or FAMILIES),
        tuple(body.get("drivers") or ()), (body.get("oracle") or {}).get("differs", ""),
        tuple(body.get("devices") or ()),
    )  # fmt: skip


def find(directories: Iterable[Path] = (SCENARIOS,), pattern: str = "*") -> list[Scenario]:
    """Return the scenarios in *directories* and below whose name matches *pattern*, by name."""
    paths = [path for directory in directories for path in directory.rglob("*.yaml")]
    return [read(path) for path in sorted(paths, key=lambda path: path.name) if fnmatch(path.stem, pattern)]

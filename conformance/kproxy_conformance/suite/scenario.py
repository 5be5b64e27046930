"""Scenario files, as far as they say where they apply."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from kproxy_conformance.network.addresses import FAMILIES

SCENARIOS = Path(__file__).parents[1] / "scenarios"
"""The scenarios that every proxy is played."""

BACKEND = "backend"
"""The driver that plays with a backend in this process."""

Step = Mapping[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C reads all scenarios in 20 ms, the other in 230."""
_KEYS = {"description", "objects", "steps", "config", "modes", "families", "drivers", "oracle"}


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
    )  # fmt: skip


def find(directories: Iterable[Path] = (SCENARIOS,), pattern: str = "*") -> list[Scenario]:
    """Return the scenarios in *directories* and below whose name matches *pattern*, by name."""
    paths = [path for directory in directories for path in directory.rglob("*.yaml")]
    return [read(path) for path in sorted(paths, key=lambda path: path.name) if fnmatch(path.stem, pattern)]

"""Wirings: how pods, the node and the hosts outside are attached to each other, as data."""

import zlib
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

WIRINGS = Path(__file__).with_name("wirings")
DEFAULT = "default"
SEED, ALL = "seed:", "all"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Family = Literal["ipv4", "ipv6"]
Reach = Literal["itself", "neighbour"]
"""What a pod reaches through a Service: itself, or another pod of its node."""
_BOTH: tuple[_Family, ...] = ("ipv4", "ipv6")


class Attachment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one pod is attached to its node."""

    attach: Literal["veth", "routed", "bridge", "cni", "host"] = "veth"
    """``veth``: to a device with an address, the pod's router. ``routed``: to a device without one, which
    answers for every address (proxy ARP), and has a link-local IPv6 address, as Calico's. ``bridge``: to
    *bridge*. ``cni``: by *plugins*. ``host``: the pod shares the node's network namespace."""
    bridge: str = ""
    hairpin: bool = True
    """The bridge sends packets back to the port that they came from."""
    plugins: tuple[dict[str, Any], ...] = ()
    """Configurations of network plugins, called one after the other; ``ipam`` is added to the first."""


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command of the network's agent, for the shell. Symbols such as ``$pod1`` are addresses."""

    run: str
    at: Literal["node", "node2"] = "node"
    families: tuple[_Family, ...] = _BOTH


class Lack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scenarios that cannot be played in a wiring, whatever the proxy does."""

    why: str
    scenarios: tuple[str, ...] = ()
    """Names, or patterns of names."""
    reaching: frozenset[Reach] = frozenset()
    """Those in which a pod of the node reaches such a pod through a Service."""
    modes: tuple[str, ...] = ()
    """The modes that cannot play them; empty: every mode but those that it *spares*."""
    spares: tuple[str, ...] = ()

    def holds_for(self, scenario: str, mode: str, reached: frozenset[Reach]) -> bool:
        if mode in self.spares or (self.modes and mode not in self.modes):
            return False
        return bool(self.reaching & reached) or any(fnmatch(scenario, each) for each in self.scenarios)


class Wiring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to attach the hosts of the topology to each other."""

    description: str
    name: str = ""
    families: tuple[_Family, ...] = _BOTH
    mtu: int = 1500
    """Of the pods' devices."""
    pods: dict[str, Attachment] = {}
    """By symbol; a pod that is missing has a plain ``veth``."""
    sysctls: dict[str, int | str] = {}
    """Settings of the node, such as ``net/ipv4/conf/all/rp_filter``, made before its devices."""
    setup: tuple[Command, ...] = ()
    """Run in each family once everything is attached."""
    options: dict[str, dict[str, Any]] = {}
    """Options that a mode needs here, by mode, as in ``kproxy.backendOptions``."""
    lacks: tuple[Lack, ...] = ()

    def of(self, pod: str) -> Attachment:
        return self.pods.get(pod, Attachment())

    @property
    def devices(self) -> frozenset[str]:
        """The devices of the node that scenarios may name."""
        bridges = {each.bridge for each in self.pods.values() if each.bridge}
        veths = {device_of(pod) for pod in ("pod1", "pod2") if self.of(pod).attach not in ("cni", "host")}
        return frozenset(bridges | veths)

    def lacking(self, scenario: str, mode: str, family: str, reached: frozenset[Reach]) -> str:
        """Return why *scenario* cannot be played here; "" if it can. *reached*: what its pods reach."""
        if family not in self.families:
            return f"wiring {self.name} has no {family}"
        for lack in self.lacks:
            if lack.holds_for(scenario, mode, reached):
                return f"wiring {self.name}: {lack.why}"
        return ""


def device_of(pod: str) -> str:
    """Return the name of the node's end of a veth to *pod*."""
    return f"kcveth{pod.removeprefix('pod')}"


def names() -> list[str]:
    """Return the names of all wirings."""
    return sorted(path.stem for path in WIRINGS.glob("*.yaml"))


def read(name: str) -> Wiring:
    """Read the wiring *name*. Raises ValueError, with the path of the file, for one that is malformed."""
    path = WIRINGS / f"{name}.yaml"
    try:
        made = msgspec.convert(yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER), Wiring)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from None
    return msgspec.structs.replace(made, name=name)


def check_choice(choice: str) -> None:
    """Raises ValueError unless *choice* names a wiring, or is ``all`` or ``seed:N``."""
    if not choice.startswith(SEED) and choice not in (ALL, *names()):
        raise ValueError(f"there is no wiring {choice!r}; known are {', '.join(names())}, {ALL} and {SEED}N")


def chosen(choice: str, scenario: str, mode: str) -> list[str]:
    """Return the names of the wirings to play *scenario* in: a name, ``all``, or one drawn by ``seed:N``."""
    if choice == ALL:
        return names()
    if choice.startswith(SEED):
        return [draw(choice.removeprefix(SEED), scenario, mode, names())]
    return [choice]


def draw(seed: str, scenario: str, mode: str, among: Iterable[str]) -> str:
    """Return the wiring for *scenario* in *mode*: always the same for equal arguments."""
    def lot(name: str) -> int:
        return zlib.crc32(f"{seed} {scenario} {mode} {name}".encode())

    return max(among, key=lot)

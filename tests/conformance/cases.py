"""The modes that scenarios are played in, and the scenarios that one of them leaves out."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kproxy_conformance.network.addresses import FAMILIES
from kproxy_conformance.network.wiring import DEFAULT, draw, read
from kproxy_conformance.suite.scenario import Scenario

LEGACY = "-legacy"
"""Suffix of a mode: with the iptables programs for the kernel's legacy interface."""
THROUGH_API = "-through-api"
"""Suffix of a mode: with objects from an API server instead of manifests."""
DRIVER = "kproxy"

_SOURCE = "endpoints see the node, never the client"
_POLICY = "traffic policies are not for a mode that does not keep client addresses"
_PROCESS = "nothing is forwarded while the process does not run"
NOT_FOR: Mapping[str, Mapping[str, str]] = {
    "userspace": {
        "clusterip-from-outside": _SOURCE,
        "clusterip-udp": _SOURCE,
        "detect-local-by-bridge": _SOURCE,
        "detect-local-by-node-cidr": _SOURCE,
        "detect-local-by-prefix": _SOURCE,
        "hairpin": _SOURCE,
        "affinity-follows-policies": _POLICY,
        "affinity-local-policies": _POLICY,
        "both-policies-local": _POLICY,
        "endpoint-on-the-host-network-local": _POLICY,
        "internal-policy-local": _POLICY,
        "loadbalancer-local": _POLICY,
        "nodeport-etp-local": _POLICY,
        "nodeport-etp-local-none": _POLICY,
        "source-ranges-local": _POLICY,
        "address-of-the-node": "frontends whose port another program holds are not served",
        "counted-rejections": "the process, not the backend, counts rejected TCP connections",
        "counted-without-the-process": _PROCESS,
        "mode-switch": _PROCESS,
        "proxy-restart": _PROCESS,
    },
    "ipvs": {
        "affinity-timeout": (
            "IPVS remembers a client as long as it has connections to the Service, those in TIME_WAIT"
            " included, which it keeps for two minutes: no shorter timeout can be had"
        ),
        "udp-client-with-a-frontend-port": (
            "IPVS takes every datagram to a node port for one of a client, the answer to a client that is"
            " bound to this port included"
        ),
    },
}
"""By mode, the scenarios that ask for what it does not do, and why; docs/userspace.md has them as a table."""
WIRINGS: Mapping[str, tuple[str, ...]] = {
    "nftables": ("routed", "two-uplinks"),
    "nftables" + THROUGH_API: ("cni-bridge", "bridge-without-hairpin"),
    "iptables": ("cni-ptp", "overlay"),
    "iptables" + LEGACY: ("cni-bridge", "ipv6-only"),
    "userspace": ("macvlan", "routed"),
    "ebpf": ("host", "bridge-unfiltered"),
}
"""By mode, the wirings that share its scenarios with the default one. Each costs every lane of the mode a
start of kproxy, so not each mode has all: ``python -m kproxy_conformance --wiring all`` plays them."""
_read = functools.cache(read)


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One scenario in one mode and family."""

    mode: str
    family: str
    scenario: str
    wiring: str = DEFAULT

    @property
    def kernel_mode(self) -> str:
        """The mode that kproxy is started in."""
        return kernel_mode(self.mode)

    def __str__(self) -> str:
        return f"{self.mode}-{self.family}-{self.scenario}"


def kernel_mode(mode: str) -> str:
    return mode.removesuffix(LEGACY).removesuffix(THROUGH_API)


def cases_of(
    mode: str, scenarios: Iterable[Scenario], left_out: Iterable[str] = (), *, in_turns: bool = False,
    wirings: Sequence[str] = (),
) -> list[Case]:  # fmt: skip
    """Return the cases of *mode* for all scenarios but those *left_out*.

    Scenarios with equal wiring and configuration follow each other, so that the proxy is seldom restarted.
    Each is played in the default wiring or one of *wirings*. With *in_turns*, each is played in one family,
    both in turns: for what differs little from another mode or kernel, where each is played in both.
    """
    driver = DRIVER + THROUGH_API if mode.endswith(THROUGH_API) else DRIVER
    ordered = sorted(scenarios, key=lambda s: (json.dumps(s.config, sort_keys=True), s.name))
    found = []
    for number, scenario in enumerate(each for each in ordered if each.name not in left_out):
        families = [
            each for each in FAMILIES if not scenario.unsuitable_for(kernel_mode(mode), each, driver)]
        if in_turns:
            families = families[number % 2 :][:1] or families[:1]
        found += [Case(mode, family, scenario.name, _wiring(mode, family, scenario, wirings))
                  for family in families]
    return sorted(found, key=lambda case: case.wiring)


def _wiring(mode: str, family: str, scenario: Scenario, others: Sequence[str]) -> str:
    """Return a wiring for *scenario*, drawn from those that allow it."""
    wirings = map(_read, (DEFAULT, *others))
    playable = [each.name for each in wirings
                if not scenario.unplayable_in(each, kernel_mode(mode), family)]
    return draw(family, scenario.name, mode, playable)


def undocumented(cases: Sequence[Case], scenarios: Iterable[Scenario], left_out: Iterable[str]) -> list[str]:
    """Return the scenarios that no case plays, though nothing says why; and *left_out* that do not exist.

    Scenarios for other drivers than the process of kproxy are played elsewhere.
    """
    known = {scenario.name: scenario for scenario in scenarios}
    modes = {case.kernel_mode for case in cases}
    played = {case.scenario for case in cases} | set(left_out)
    return [name for name in left_out if name not in known] + [
        name for name, scenario in known.items()
        if name not in played
        and (not scenario.modes or set(scenario.modes) & modes)
        and (not scenario.drivers or DRIVER in scenario.drivers)
    ]  # fmt: skip

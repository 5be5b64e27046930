"""Runs of the kit as an author would start them, one for each backend of this repository."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kproxy_conformance.checks import contract, lifecycle
from kproxy_conformance.pytest_plugin import NODE_CGROUP
from kproxy_conformance.suite.scenario import BACKEND, find
from kproxy_core.model.address import Family
from tests.conformance.cases import NOT_FOR
from tests.core.bpf_places import new_bpf_file_system
from tests.guest.guest import Guest, with_nft

SIDE_BY_SIDE = 2
"""The userspace mode mostly waits."""

_KUBELET = "*filter\\n:KUBE-FIREWALL -\\n-A INPUT -j KUBE-FIREWALL\\n-A OUTPUT -j KUBE-FIREWALL\\nCOMMIT\\n"
PINS = "{pins}"
"""In settings: a BPF file system of the run's own."""
PINNED = ("ebpf",)


def _left_out(mode: str) -> list[str]:
    return [f"{name}: {reason}" for name, reason in NOT_FOR[mode].items()]


INI: Mapping[str, Mapping[str, Sequence[str]]] = {
    "nftables": {},
    "iptables": {
        # A chain of the kubelet, which this mode makes if it is not there and leaves to it.
        "kproxy_node": [f"printf '{_KUBELET}' | {p}-restore -n" for p in ("iptables", "ip6tables")],
    },
    "userspace": {
        "kproxy_not_applicable": [
            "restart-writes-nothing: every process has relays of its own",
            "close-leaves-the-kernel-alone: connections end with the process",
            *_left_out("userspace"),
        ],
    },
    "ipvs": {"kproxy_not_applicable": _left_out("ipvs")},
    "ebpf": {
        "kproxy_state": [f"find {PINS} -path '*kproxy*' -type f -printf '%P\\n' | sort"],
        "kproxy_damage": [f"rm -rf {PINS}/kproxy"],
    },
}
"""The ini files of these backends' authors."""

OPTIONS = {
    "userspace": ("--kproxy-option=workers=1", "--kproxy-option=syncPeriod=1s"),
    "ebpf": (f"--kproxy-option=cgroup={NODE_CGROUP}", f"--kproxy-option=pinDirectory={PINS}/kproxy"),
}
IN_A_GUEST = "ipvs"
"""The mode that this kernel may lack. A guest takes minutes for a family: the contract is checked in IPv6."""
ONLY_HERE = tuple(scenario.name for scenario in find() if scenario.drivers == (BACKEND,))
"""Scenarios that no whole kproxy plays. test_an_installed_example.py plays all others without one, too."""


class Results(NamedTuple):
    """The result of a run."""

    asked: frozenset[str]
    """The checks and scenarios, those that are not applicable among them."""
    wrong: Mapping[str, str]
    """By check, for those that failed."""

    @property
    def problems(self) -> str:
        """All that is wrong, in full: pytest cuts what it compares."""
        return "\n".join(self.wrong.values())


def play(mode: str, directory: Path) -> Results:
    """Run the kit in *directory*, which is made and has nothing but an ini file."""
    directory.mkdir()
    if mode not in PINNED:
        return _play(mode, directory)
    with new_bpf_file_system(directory.with_name(f"{mode}-pins")) as pins:
        return _play(mode, directory, str(pins))


def _play(mode: str, directory: Path, pins: str = "") -> Results:
    ini = "[pytest]\n"
    for name, values in INI[mode].items():
        ini += f"{name} =\n" + "".join(f"    {line}\n" for line in values)
    (directory / "pytest.ini").write_text(ini.replace(PINS, pins))
    report = directory / "report.xml"
    contract = "(contract and not IPv4)" if mode == IN_A_GUEST else "contract"
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--kproxy-mode={mode}",
        f"--rootdir={directory}", f"--config-file={directory}/pytest.ini", f"--junitxml={report}",
        *(option.replace(PINS, pins) for option in OPTIONS.get(mode, ())),
        "-k", " or ".join((contract, *ONLY_HERE)), str(directory),
    ]  # fmt: skip
    if mode == IN_A_GUEST:
        # Evidence of a failed scenario outlives the guest.
        kept = ["env", f"TMPDIR={directory}", *command]
        with Guest(with_nft(kept), directory / "log", share=directory) as guest:
            guest.status()
            output = guest.output
    else:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
    if report.exists():
        return results(report)
    return Results(frozenset(), {"the kit itself": output[-4000:]})


def to_be_asked(mode: str) -> frozenset[str]:
    """Return all checks, and the scenarios that the kit plays in *mode*."""
    checks = (
        check.name + (f"[{family.label}]" if family else "")
        for check in (*lifecycle.CHECKS, *contract.CHECKS)
        for family in check.families
        if not (mode == IN_A_GUEST and family is Family.IPV4)
    )
    scenarios = (
        f"{scenario.name}[{family.label}]"
        for scenario in find() for family in Family
        if scenario.name in ONLY_HERE and not scenario.not_for(mode, family.label.lower())
    )  # fmt: skip
    return frozenset((*checks, *scenarios))


def results(report: Path) -> Results:
    asked, wrong = set(), {}
    for case in ElementTree.parse(report).iter("testcase"):
        check = str(case.get("name"))
        asked.add(check)
        problems = [part.text or "failed" for part in case if part.tag in ("failure", "error")]
        if problems:
            wrong[check] = "\n".join(problems)
    return Results(frozenset(asked), wrong)

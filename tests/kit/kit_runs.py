"""Runs of the kit as an author would start them, one for each backend of this repository."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kproxy_core.testing.conformance import contract, lifecycle, packets
from tests.guest.guest import Guest

SIDE_BY_SIDE = 2
"""The userspace mode mostly waits."""
LONGEST = 1200
"""Seconds until a guest is given up; its checks take four minutes of a processor."""

_KUBELET = "*filter\\n:KUBE-FIREWALL -\\n-A INPUT -j KUBE-FIREWALL\\n-A OUTPUT -j KUBE-FIREWALL\\nCOMMIT\\n"
_PROCESS = "connections end with the process"
INI: Mapping[str, Mapping[str, Sequence[str]]] = {
    "nftables": {},
    "iptables": {
        # A chain of the kubelet, which this mode makes if it is not there and leaves to it.
        "kproxy_node": [f"printf '{_KUBELET}' | {p}-restore -n" for p in ("iptables", "ip6tables")],
    },
    "userspace": {
        "kproxy_not_applicable": [
            "restart-writes-nothing: every process has relays of its own",
            f"close-leaves-the-kernel-alone: {_PROCESS}",
            f"restart-goes-unnoticed: {_PROCESS}",
            "pods-see-the-client-pod",
            "external-ip-serves-the-node: as in kube-proxy's userspace mode",
            "external-policy-local-keeps-the-client-address",
            "external-policy-local-without-local-endpoints-is-silent",
            "internal-policy-local-stays-on-the-node",
        ],
    },
    "ipvs": {},
}
"""The ini files of these backends' authors."""

OPTIONS = {"userspace": ("--kproxy-option=workers=1", "--kproxy-option=syncPeriod=1s")}
IN_A_GUEST = "ipvs"
"""The mode that this kernel may lack."""


class Results(NamedTuple):
    """The result of a run."""

    asked: frozenset[str]
    """The checks, those that are not applicable among them."""
    wrong: Mapping[str, str]
    """By check, for those that failed."""


def play(mode: str, directory: Path) -> Results:
    """Run the kit in *directory*, which is made and has nothing but an ini file."""
    directory.mkdir()
    ini = "[pytest]\n"
    for name, values in INI[mode].items():
        ini += f"{name} =\n" + "".join(f"    {line}\n" for line in values)
    (directory / "pytest.ini").write_text(ini)
    report = directory / "report.xml"
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--kproxy-mode={mode}",
        f"--rootdir={directory}", f"--config-file={directory}/pytest.ini", f"--junitxml={report}",
        *OPTIONS.get(mode, ()), str(directory),
    ]  # fmt: skip
    if mode == IN_A_GUEST:
        with Guest(command, directory / "log", share=directory, seconds=LONGEST) as guest:
            guest.status()
            output = guest.output
    else:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
    if report.exists():
        return results(report)
    return Results(frozenset(), {"the kit itself": output[-4000:]})


def to_be_asked() -> frozenset[str]:
    """All checks of the kit."""
    return frozenset(
        check.name + (f"[{family.label}]" if family else "")
        for check in (*lifecycle.CHECKS, *contract.CHECKS, *packets.CHECKS)
        for family in check.families
    )


def results(report: Path) -> Results:
    asked, wrong = set(), {}
    for case in ElementTree.parse(report).iter("testcase"):
        check = str(case.get("name"))
        asked.add(check)
        problems = [part.text or "failed" for part in case if part.tag in ("failure", "error")]
        if problems:
            wrong[check] = "\n".join(problems)
    return Results(frozenset(asked), wrong)

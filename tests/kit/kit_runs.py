"""Runs of the kit as an author would start them, one for each backend of this repository."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.guest.guest import Guest

SIDE_BY_SIDE = 3
"""The guest has a processor for itself, and the userspace mode mostly waits."""
LONGEST = 600
"""Seconds until a guest is given up."""

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
"""What the authors of these backends have in their ini files."""

OPTIONS = {"userspace": ("--kproxy-option=workers=1", "--kproxy-option=syncPeriod=1s")}
IN_A_GUEST = {
    "ipvs": "cleanup or retires or close or (restart-writes or second-full or packets) and IPv4",
}
"""The modes that this kernel may lack, and what is asked of them: a guest is ten times as slow."""

Results = Mapping[str, str]
"""By check: "", or what was wrong; those that are not applicable are left out."""


def play(mode: str, directory: Path) -> Results:
    """Run the kit in *directory*, where there is nothing but an ini file."""
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
    if mode in IN_A_GUEST:
        command += ["-k", IN_A_GUEST[mode]]
        with Guest(command, directory / "log", share=directory, seconds=LONGEST) as guest:
            guest.status()
            output = guest.output
    else:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
    return results(report) if report.exists() else {"the kit itself": output[-4000:]}


def results(report: Path) -> Results:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            wrong = [part.text or "failed" for part in case if part.tag in ("failure", "error")]
            found[str(case.get("name"))] = "\n".join(wrong)
    return found

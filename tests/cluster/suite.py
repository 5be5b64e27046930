"""Kubernetes' own end-to-end specs, and what became of them."""

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.cluster import Cluster

FOCUS = r"\[sig-network\]"
LEFT_OUT = {
    r"\[Feature:NetworkPolicy\]": "the cluster's network plugins know no policies",
    r"\[Feature:SCTPConnectivity\]": "this kernel has no sockets for SCTP",
    r"\[Feature:Networking-(IPv4|IPv6|DNS)\]": "dials hosts on the Internet",
    r"\[Feature:PerformanceDNS\]": "measures the cluster DNS with 10,000 Services",
    r"\[Feature:Networking-Performance\]": "reads the output of a newer iperf than Debian 12's",
    r"\[Feature:KubeProxyDaemonSetMigration\]": "replaces kube-proxy by itself on Google's machines",
    r"DNS configMap nameserver": "configures CoreDNS, and this cluster's DNS is another",
    r"DNS should support configurable pod resolv.conf": "runs CoreDNS in a pod, which the image lacks",
    r"rejected for evicted pods": "the nodes' files are in memory, and the kubelet does not count them",
}
"""Patterns of specs that are not run, each with the reason. A spec can also skip itself."""


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    outcome: str
    """``passed``, ``failed``, or ``skipped`` by itself."""
    message: str
    """Why it failed or skipped itself."""


def play(cluster: Cluster, directory: Path, focus: str, processes: int) -> list[Spec]:
    """Run the specs that match *focus*, and return what became of them. Output goes to *directory*."""
    directory.mkdir(parents=True)
    binaries = cluster.binaries
    with (directory / "log").open("wb") as log:
        cluster.home.start(
            [str(binaries / "ginkgo"), "run", f"--procs={processes}", "--no-color", "--silence-skips",
             "--timeout=3h", "--flake-attempts=1", "--junit-report=junit.xml", f"--output-dir={directory}",
             f"--focus={focus}", *(f"--skip={pattern}" for pattern in LEFT_OUT),
             str(binaries / "e2e.test"), "--", "--provider=skeleton", f"--kubeconfig={cluster.kubeconfig}",
             f"--kubectl-path={binaries / 'kubectl'}", f"--num-nodes={len(cluster.nodes)}",
             "--disable-log-dump", "--dump-logs-on-failure=false", "--delete-namespace-on-failure=true",
             f"--report-dir={directory}"], log).wait()  # fmt: skip
    return list(_outcomes(directory / "junit.xml"))


def _outcomes(report: Path) -> Iterator[Spec]:
    for case in ET.parse(report).getroot().iter("testcase"):
        kind, _, rest = str(case.get("name")).partition(" ")
        if kind != "[It]":
            continue  # preparations
        name = rest.rpartition(" [")[0]  # its labels follow
        failure, skipped = case.find("failure"), case.find("skipped")
        failure = case.find("error") if failure is None else failure
        if failure is not None:
            yield Spec(name, "failed", str(failure.get("message") or failure.text))
        elif skipped is None:
            yield Spec(name, "passed", "")
        elif reason := str(skipped.get("message")).removeprefix("skipped").lstrip("- "):
            yield Spec(name, "skipped", reason)  # without a reason it was not chosen


def table(played: str, specs: list[Spec]) -> str:
    """Return a line of Markdown, and one for each spec that failed or skipped itself."""
    counts = Counter(spec.outcome for spec in specs)
    rest = [f"  - {spec.outcome}: {spec.name}: {spec.message.splitlines()[0]}"
            for spec in sorted(specs, key=lambda spec: spec.outcome) if spec.outcome != "passed"]  # fmt: skip
    return "\n".join([f"| {played} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |", *rest])

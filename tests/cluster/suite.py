"""Kubernetes' own end-to-end specs, and what became of them."""

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.cluster import Cluster

FOCUS = r"\[sig-network\]"
LEFT_OUT = {
    r"\[Feature:": "needs a feature, a provider or an add-on that the cluster lacks",
    r"\[Disruptive\]": "restarts parts of the cluster that other specs use",
    r" DNS ": "needs CoreDNS",
    r"\[Slow\]": "takes more than five minutes",
}
"""Patterns of specs that are not run, each with the reason."""


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    outcome: str
    """``passed``, ``failed`` or ``skipped``."""
    message: str


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
        failure = case.find("failure")
        failure = case.find("error") if failure is None else failure
        if failure is not None:
            yield Spec(str(case.get("name")), "failed", str(failure.get("message") or failure.text))
        elif case.find("skipped") is None:
            yield Spec(str(case.get("name")), "passed", "")


def table(mode: str, specs: list[Spec]) -> str:
    """Return a line of Markdown for *mode*, and one for each spec that failed."""
    counts = Counter(spec.outcome for spec in specs)
    failed = [f"  - {s.name}: {s.message.partition(chr(10))[0]}" for s in specs if s.outcome == "failed"]
    return "\n".join([f"| {mode} | {len(specs)} | {counts['passed']} |", *failed])

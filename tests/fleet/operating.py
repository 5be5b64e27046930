"""docs/operating.md in a cluster: run the page, and write what its commands print.

``python -m tests.fleet.operating`` puts today's outputs into the page.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kproxy_conformance.processes import own_name
from tests.fleet import kubectl
from tests.fleet.fleet import PORT, Fleet
from tests.patience import PATIENCE

PAGE = Path(__file__).parents[2] / "docs" / "operating.md"
KEY = "kproxy.dev/mode"

_STEP = re.compile(
    r"^## (?P<heading>[^\n]*)$"
    r"|^```sh\n(?P<command>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.MULTILINE | re.DOTALL)


class Step(NamedTuple):
    """A command of the page."""

    command: str
    shown: str | None
    """The text below it; None: nothing is shown."""
    printed: str


def run(fleet: Fleet, directory: Path) -> list[Step]:
    """Run the commands of the page in order, one shell each."""
    program = directory / "kubectl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -B {kubectl.__file__} "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "KUBECONFIG": fleet.kubeconfig, "PATH": f"{directory}:{os.environ['PATH']}",
                   "COLUMNS": "200"}
    steps = []
    for found in _STEP.finditer(PAGE.read_text(encoding="utf-8")):
        if found["heading"]:
            _prepare(fleet, found["heading"])
            continue
        ran = subprocess.run(
            ["ip", "netns", "exec", fleet.hub.name, "bash", "-c", found["command"]], env=environment,
            cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=PATIENCE)
        lines = "".join(f"{line.rstrip()}\n" for line in ran.stdout.splitlines())
        steps.append(Step(found["command"], found["shown"], lines))
        if found["command"].startswith("kubectl label"):
            _settle(fleet)
    return steps


def _prepare(fleet: Fleet, heading: str) -> None:
    """Make what the part of the page under *heading* is about."""
    node = fleet.nodes["node-b"]
    if heading == "Find a bad endpoint":
        node.run("nft", f"table inet filter {{ chain input {{ type filter hook input priority 0;"
                        f" tcp dport {PORT} drop; }}; }}")
    elif node.attempt("nft", "list", "table", "inet", "filter").returncode == 0:
        node.run("nft", "delete", "table", "inet", "filter")


def _settle(fleet: Fleet) -> None:
    """Wait until every node follows its label."""
    deadline = time.monotonic() + PATIENCE
    labels = {
        node: fleet.server.store.resources["nodes"].items["", node].obj["metadata"]["labels"].get(KEY)
        for node in fleet.proxies}
    for node, proxy in fleet.proxies.items():
        while not _follows(proxy.get(10249, "/proxyMode")[1], proxy.health()[1], labels[node]):
            assert time.monotonic() < deadline, (node, labels[node], proxy.health())
            time.sleep(0.05)


def _follows(serving: str, health: str, label: str | None) -> bool:
    return f"label {KEY}: " in health or serving == (label or "nftables")


def written(page: str, steps: list[Step]) -> str:
    """Return *page* with the outputs of *steps* in the place of those it shows."""
    left = iter(steps)

    def replace(found: re.Match[str]) -> str:
        if found["heading"]:
            return found[0]
        step = next(left)
        text = f"```sh\n{found['command']}```\n"
        return text if found["shown"] is None else f"{text}\n```text\n{step.printed}```\n"

    return _STEP.sub(replace, page)


def main() -> None:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{own_name('fleet')}-")))
        fleet = Fleet(stack, directory)
        steps = run(fleet, directory)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), steps), encoding="utf-8")


if __name__ == "__main__":
    main()

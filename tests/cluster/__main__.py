"""``python -m tests.cluster --binaries DIR``: three nodes, changes under load, and Kubernetes' specs."""

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.cluster import deployment, events, images, load, suite
from tests.cluster.cluster import Cluster
from tests.cluster.fabric import fabric
from tests.cluster.node import PAUSE

NODES = 3
_TOOLS = ("bash", "bind9-dnsutils", "curl", "iproute2", "netcat-openbsd", "wget")
"""What agnhost's specs call in its image."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--binaries", type=Path, default=os.environ.get("KUBERNETES_BIN"),
                        help="Kubernetes' programs, see the README  [default: $KUBERNETES_BIN]")
    parser.add_argument("--modes", default="nftables,iptables,ebpf", help="in this order")
    parser.add_argument("--focus", default=suite.FOCUS, help="specs, as for ginkgo; empty: none")
    parser.add_argument("--processes", type=int, default=4, help="specs at a time")
    parser.add_argument("--shell", action="store_true", help="before the end, start a shell with kubectl")
    parser.add_argument("--directory", type=Path, help="for images, made once, and for logs and reports")
    arguments = parser.parse_args()
    if arguments.binaries is None:
        parser.error("--binaries or KUBERNETES_BIN must name a directory")
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="kproxy-cluster-", dir="/var/tmp"))
    failed = False
    with ExitStack() as stack:
        archives = _images(directory, arguments.binaries)
        agnhost = images.names_in_the_suite(arguments.binaries, "agnhost")[0]
        directory = Path(tempfile.mkdtemp(prefix="run-", dir=directory))
        print(f"logs in {directory}", flush=True)
        cluster = Cluster(arguments.binaries, directory, stack.enter_context(fabric(NODES)), stack, archives)
        for mode in arguments.modes.split(","):
            deployment.deploy(cluster, mode)
            print(f"{mode}: kproxy is ready on {len(cluster.nodes)} nodes", flush=True)
            other = "iptables" if mode == "nftables" else "nftables"
            for line in events.play(cluster, load.serve(cluster, agnhost), mode, other):
                print(line, flush=True)
            if arguments.focus:
                specs = suite.play(cluster, directory / f"specs-{mode}", arguments.focus, arguments.processes)
                failed |= any(spec.outcome == "failed" for spec in specs) or not specs
                print(suite.table(mode, specs), flush=True)
        if arguments.shell:
            cluster.shell()
    return failed


def _images(directory: Path, binaries: Path) -> list[Path]:
    """Return the archives of all images, which are made where *directory* lacks them."""
    made = directory / "images"
    if not made.exists():
        made.mkdir(parents=True)
        base = images.debian(directory / "base")
        for path in images.kproxy(directory, base, deployment.IMAGE):
            path.rename(made / path.name)
        tools = images.debian(directory / "tools", _TOOLS)
        subprocess.run(["cp", binaries / "agnhost", tools / "agnhost"], check=True)
        names = images.names_in_the_suite(binaries, "agnhost")
        images.archive(made / "agnhost.tar", tools, names, Entrypoint=["/agnhost"], Cmd=["pause"])
        images.of_a_program(made / "pause.tar", binaries / "pause", PAUSE, directory / "pause")
    return sorted(made.glob("*.tar"))


if __name__ == "__main__":
    sys.exit(main())

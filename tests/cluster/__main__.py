"""``python -m tests.cluster --binaries DIR``: three nodes, changes under load, and Kubernetes' specs."""

import argparse
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from kproxy_conformance.network.namespaces import run
from tests.cluster import deployment, events, images, load, suite
from tests.cluster.cluster import Cluster
from tests.cluster.fabric import fabric
from tests.cluster.node import PAUSE

NODES = 3
_TOOLS = ("bash", "bind9-dnsutils", "conntrack", "curl", "iproute2", "iptables", "kmod", "netcat-openbsd",
          "nftables", "wget")  # fmt: skip
"""What specs, and kube-proxy, call in their images."""
_SAME = ("agnhost", "busybox", "distroless-iptables", "glibc-dns-testing", "nginx")
"""Images of the suite that are one here. agnhost's is first."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--binaries", type=Path, default=os.environ.get("KUBERNETES_BIN"),
                        help="Kubernetes' programs, see the README  [default: $KUBERNETES_BIN]")
    parser.add_argument("--modes", default="nftables,iptables,ebpf",
                        help="in this order; kube-proxy/nftables and kube-proxy/iptables are kube-proxy's")
    parser.add_argument("--focus", default=suite.FOCUS, help="specs, as for ginkgo; empty: none")
    parser.add_argument("--no-events", dest="events", action="store_false", help="specs only")
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
        agnhost = images.names_in_the_suite(arguments.binaries, *_SAME)[0]
        directory = Path(tempfile.mkdtemp(prefix="run-", dir=directory))
        print(f"logs in {directory}", flush=True)
        cluster = Cluster(arguments.binaries, directory, stack.enter_context(fabric(NODES)), stack, archives)
        for played in arguments.modes.split(","):
            proxy, _, mode = played.rpartition("/")
            if proxy == "kube-proxy":
                deployment.deploy_kube_proxy(cluster, mode)
            else:
                deployment.deploy(cluster, mode)
            print(f"{played}: ready on {len(cluster.nodes)} nodes", flush=True)
            if arguments.events and not proxy:
                other = "iptables" if mode == "nftables" else "nftables"
                for line in events.play(cluster, load.serve(cluster, agnhost), mode, other):
                    print(line, flush=True)
            if arguments.focus:
                specs = suite.play(cluster, directory / f"specs-{played.replace('/', '-')}", arguments.focus,
                                   arguments.processes)
                failed |= any(spec.outcome == "failed" for spec in specs) or not specs
                print(suite.table(played, specs), flush=True)
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
        for program in ("agnhost", "kube-proxy"):
            shutil.copy(binaries / program, tools)
        run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
            "-keyout", str(tools / "localhost.key"), "-out", str(tools / "localhost.crt"))  # agnhost's
        (tools / "etc" / "wgetrc").write_text("tries = 1\n")  # as busybox's, which the suite means
        names = [*images.names_in_the_suite(binaries, *_SAME), deployment.KUBE_PROXY]
        images.archive(made / "tools.tar", tools, names, Entrypoint=["/agnhost"], Cmd=["pause"])
        images.of_a_program(made / "pause.tar", binaries / "pause", [PAUSE], directory / "pause")
        sender = "regression-issue-74839"
        images.of_a_program(made / f"{sender}.tar", binaries / sender,
                            images.names_in_the_suite(binaries, sender), directory / sender)
    return sorted(made.glob("*.tar"))


if __name__ == "__main__":
    sys.exit(main())

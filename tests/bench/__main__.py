"""Measure service proxies side by side: ``python -m tests.bench``.

Each runs in a fresh network namespace against the static API server; README.md explains each number.
Needs root, ip, and nft or iptables. Without --proxy, measures this checkout. Several proxies run in turn (A B
A B A B with --rounds 3), and the ratios to the first are printed.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kproxy_conformance.processes import own_name
from tests.bench import checkouts
from tests.bench.measured import Json, sh
from tests.bench.report import table
from tests.bench.run import Run
from tests.sweep import begin

EVERY = (
    ("nftables", 100, 5), ("nftables", 1000, 5), ("nftables", 10_000, 5), ("nftables", 1, 5000),
    ("iptables", 100, 5), ("iptables", 1000, 5), ("userspace", 100, 5), ("userspace", 1000, 5),
)  # fmt: skip
"""Modes and sizes of the option --every."""

PHASES = ("connect", "incremental", "churn", "restart", "count")


def run_in_namespace(spec: Json) -> Json:
    """Return the result of one run, in a namespace that lives only as long."""
    name = f"{own_name('bench')}-{spec['number']}"
    sh(f"ip netns add {name}")
    child = None
    try:
        with open(f"{spec['dir']}/spec.json", "w") as f:
            json.dump(spec, f)
        child = subprocess.Popen(["ip", "netns", "exec", name, sys.executable, "-m", "tests.bench",
                                  "--inside", f"{spec['dir']}/spec.json"], stdout=subprocess.PIPE, text=True)
        out, _ = child.communicate()
        result: Json = json.loads(out)
        return result
    finally:
        if child and child.poll() is None:
            child.send_signal(signal.SIGTERM)
            child.wait()
        sh(f"ip netns del {name}", check=False)


def main() -> None:
    begin()
    if sys.argv[1:2] == ["--inside"]:
        with open(sys.argv[2]) as f:
            print(json.dumps(Run(json.load(f)).measure_all()))
        return
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--proxy", action="append", metavar="NAME=COMMAND", default=[],
                   help="command with {config} {master} {node} {mode}; may be given more than once")
    p.add_argument("--compare", metavar="REV", help="also measure this revision, and print ratios to it")
    p.add_argument("--every", action="store_true", help="every mode that this kernel has, in typical sizes")
    p.add_argument("--mode", action="append", help="proxy mode(s): nftables, iptables, userspace (nftables)")
    p.add_argument("--services", type=int, nargs="+", default=[1000])
    p.add_argument("--endpoints", type=int, nargs="+", default=[5])
    p.add_argument("--gen", default="", help="more options of the objects: nodeport=0.1,affinity=0.1,...")
    p.add_argument("--min-sync", nargs="+", default=["0s"],
                   help="minSyncPeriod value(s); 0s is the default of a proxy, 1 s for kube-proxy")
    p.add_argument("--kubeconfig", action="store_true", help="name the API server in a kubeconfig")
    p.add_argument("--phases", nargs="*", choices=PHASES,
                   default=["connect", "incremental", "churn", "count"])
    p.add_argument("--changes", type=int, default=120, help="changes in the incremental phase")
    p.add_argument("--gap", type=float, default=None,
                   help="seconds between changes, at most (1.0 with min-sync 1s, else 0.1)")
    p.add_argument("--incremental-limit", type=float, default=180.0, help="seconds of the phase at most")
    p.add_argument("--rates", type=float, nargs="+", default=[10, 100], help="changes a second of the churn")
    p.add_argument("--beside", action="append", default=[""], metavar="COMMAND",
                   help="repeat the churn while COMMAND runs in a loop; {frontend} is one of a Service")
    p.add_argument("--churn-seconds", type=float, default=30.0)
    p.add_argument("--connects", type=int, default=500, help="connects to each place in the connect phase")
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--timeout", type=float, default=480.0, help="give up on an initial sync after so long")
    p.add_argument("--detect", choices=("netlink", "probe"),
                   help="how to see a change: nf_tables notifications, or connecting (as the mode needs)")
    p.add_argument("--watch-list", choices=("on", "off"), default="on")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                   help="set a key of the KubeProxyConfiguration, e.g. nftables.syncPeriod=1m")
    p.add_argument("--out", help="append the results to this JSON file")
    p.add_argument("--table", nargs="+", metavar="FILE", help="only print the table of these result files")
    args = p.parse_args()
    if args.table:
        print(table([result for path in args.table for result in json.loads(Path(path).read_text())]))
        return
    with ExitStack() as stack:
        proxies = list(args.proxy)
        if args.compare:
            other = stack.enter_context(checkouts.revision(args.compare))
            proxies.append(f"{args.compare}={checkouts.command(other)}")
        if args.compare or not args.proxy:
            proxies.append(f"this={checkouts.command()}")
        print(table(measure(args, proxies)))


def measure(args: argparse.Namespace, proxies: Sequence[str]) -> list[Json]:
    """Run *proxies* (NAME=COMMAND) alternately in every scenario, and return the results."""
    earlier: list[Json] = []
    if args.out and os.path.exists(args.out):
        earlier = json.loads(Path(args.out).read_text())
    results: list[Json] = []
    number = itertools.count()
    work = tempfile.mkdtemp(prefix="kproxy-bench-")
    sizes = EVERY if args.every else tuple(
        itertools.product(args.mode or ["nftables"], args.services, args.endpoints))
    for (mode, services, endpoints), min_sync in itertools.product(sizes, args.min_sync):
        for round_, proxy in itertools.product(range(args.rounds), proxies):
            name, command = proxy.split("=", 1)
            n = next(number)
            directory = os.path.join(work, str(n))
            os.mkdir(directory)
            spec = {"proxy": name, "command": command, "mode": mode, "min_sync": min_sync, "round": round_,
                    "gen": ",".join(filter(None, [f"services={services},endpoints={endpoints}", args.gen])),
                    "phases": args.phases, "changes": args.changes, "rates": args.rates,
                    "beside": args.beside,
                    "gap": args.gap if args.gap is not None else (1.0 if min_sync == "1s" else 0.1),
                    "incremental_limit": args.incremental_limit, "churn_seconds": args.churn_seconds,
                    "connects": args.connects, "timeout": args.timeout,
                    "detect": args.detect or ("probe" if mode == "userspace" else "netlink"),
                    "kubeconfig": args.kubeconfig, "watch_list": args.watch_list, "set": args.set,
                    "dir": directory, "number": n}
            about = f"{name} {mode} {services}x{endpoints} min-sync {min_sync} round {round_}"
            print(f"{about} ({directory})", file=sys.stderr, flush=True)
            results.append(run_in_namespace(spec))
            if args.out:
                with open(args.out, "w") as f:
                    json.dump(earlier + results, f, indent=1)
    return results


if __name__ == "__main__":
    main()

"""Play scenarios against a proxy: ``python -m kproxy_conformance --mode nftables --scenario hairpin``.

Needs root, and the programs ip, nft, iptables, ipset and conntrack. No traffic leaves the network namespaces
that it makes. The last line is ``N passed, N failed, N skipped``; the exit status is 1 if any failed.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path

from kproxy_conformance.drivers.backend import BackendDriver
from kproxy_conformance.drivers.driver import NO_OPTIONS, Driver
from kproxy_conformance.drivers.kproxy import KPROXY, KproxyDriver, ThroughApiDriver
from kproxy_conformance.drivers.kube_proxy import KubeProxyDriver
from kproxy_conformance.network.addresses import FAMILIES
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.network.rights import MissingRight
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.network.wiring import ALL, DEFAULT, SEED, check_choice, chosen, names, read
from kproxy_conformance.processes import own_name
from kproxy_conformance.suite.scenario import SCENARIOS, Scenario, find
from kproxy_conformance.suite.stage import FAILED, PASSED, SKIPPED, Result, Stage

SOCKET_MODES = ("ebpf",)
"""Modes that work at the sockets of the node and its pods: their option ``cgroup`` names it."""
DRIVERS = (BackendDriver.name, KproxyDriver.name, ThroughApiDriver.name, KubeProxyDriver.name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kproxy_conformance", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--driver", choices=DRIVERS, default=KproxyDriver.name)
    parser.add_argument("--command", default="", help="command line of the proxy")
    parser.add_argument("--apiserver", default="kube-apiserver", help="for the driver kube-proxy")
    parser.add_argument("--etcd", default="etcd", help="for the driver kube-proxy")
    parser.add_argument("--mode", required=True)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this IP family")
    parser.add_argument("--scenario", default="*", metavar="GLOB", help="only matching names")
    parser.add_argument("--dir", action="append", type=Path, help="folder of scenarios; may be repeated")
    parser.add_argument(
        "--wiring", default=DEFAULT, metavar="NAME",
        help=f"how pods are attached: {', '.join(names())}; {ALL}, or {SEED}N to draw one for each scenario",
    )
    parser.add_argument("--list", action="store_true", help="list the scenarios and stop")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--workdir", type=Path, help="keep logs and evidence here")
    parser.add_argument("--packets", type=Path, metavar="FILE", help="write the packets at the node")
    return parser.parse_args()


def main() -> int:
    options = _arguments()
    scenarios = find(options.dir or [SCENARIOS], options.scenario)
    if options.list:
        for scenario in scenarios:
            print(f"{scenario.name}: {scenario.description}")
        return 0
    if not scenarios:
        sys.exit("no scenario matches")
    try:
        check_choice(options.wiring)
    except ValueError as error:
        sys.exit(f"--wiring: {error}")
    if os.geteuid() != 0:
        sys.exit("network namespaces need root")
    if options.driver == KubeProxyDriver.name:
        programs = (shlex.split(options.command or "kube-proxy")[0], options.apiserver, options.etcd)
        if missing := ", ".join(program for program in programs if shutil.which(program) is None):
            sys.exit(f"not found: {missing}; --command, --apiserver and --etcd say where they are")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    directory = options.workdir or Path(tempfile.mkdtemp(prefix=f"{own_name('scenarios')}-"))
    results = _play(options, scenarios, directory)
    tally = Counter(result.status for result in results)
    if options.report:
        options.report.write_text(json.dumps([result.as_json() for result in results], indent=1))
    if not options.workdir and not tally[FAILED]:
        shutil.rmtree(directory)
    print(f"{tally[PASSED]} passed, {tally[FAILED]} failed, {tally[SKIPPED]} skipped")
    return 1 if tally[FAILED] else 0


def _play(options: argparse.Namespace, scenarios: list[Scenario], directory: Path) -> list[Result]:
    def make_driver(topology: Topology, directory: Path) -> Driver:
        if options.driver == KubeProxyDriver.name:
            return KubeProxyDriver(
                topology, directory, options.command or "kube-proxy",
                apiserver=options.apiserver, etcd=options.etcd,
            )  # fmt: skip
        if options.driver == BackendDriver.name:
            return BackendDriver(topology, directory, options=given)
        kind = KproxyDriver if options.driver == KproxyDriver.name else ThroughApiDriver
        return kind(topology, directory, options.command or KPROXY, given)

    results: list[Result] = []
    by_wiring: defaultdict[str, list[Scenario]] = defaultdict(list)
    for scenario in sorted(scenarios, key=lambda s: (json.dumps(s.config, sort_keys=True), s.name)):
        for wiring in chosen(options.wiring, scenario.name, options.mode):
            by_wiring[wiring].append(scenario)
    with ExitStack() as stack:
        cgroup, given = None, NO_OPTIONS
        if options.mode in SOCKET_MODES:
            cgroup = NodeCgroup()
            stack.callback(cgroup.close)
            given = {options.mode: {"cgroup": str(cgroup.path)}}
        for wiring in sorted(by_wiring):
            try:
                stage = Stage(make_driver, directory / wiring, cgroup, read(wiring))
            except MissingRight as error:
                number = len(by_wiring[wiring])
                print(f"missing: wiring {wiring}, {number} scenarios: {error.reason}", flush=True)
                results.append(Result("*", options.mode, "", SKIPPED, str(error), wiring=wiring))
                continue
            with stage:
                for scenario in by_wiring[wiring]:
                    for family in options.family or FAMILIES:
                        results.append(stage.play(scenario, options.mode, family))
                        _print(results[-1])
                if options.packets:
                    stage.write_packets(options.packets)
    return results


def _print(result: Result) -> None:
    reason = f"  ({result.detail})" if result.status == SKIPPED else ""
    where = "" if result.wiring == DEFAULT else f" in {result.wiring}"
    played = f"{result.scenario} {result.family}{where}"
    print(f"{result.status:8}{result.seconds:6.1f} s  {played}{reason}", flush=True)
    if result.status == FAILED:
        print(result.detail, flush=True)


if __name__ == "__main__":
    sys.exit(main())

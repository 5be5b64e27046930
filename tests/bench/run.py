"""The measurements of one proxy, in a network namespace of its own. README.md says what each of them
means."""

import itertools
import os
import random
import select
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import yaml

from kproxy_conformance.apiserver import objects
from tests.bench import nftables_monitor
from tests.bench.measured import (
    HEALTHZ_PORT,
    METRICS_PORT,
    Api,
    Json,
    Prober,
    Process,
    metrics,
    sh,
    summary,
    sync_metrics,
)


@contextmanager
def repeated(command: str) -> Iterator[None]:
    """Run a shell command again and again meanwhile; "": none."""
    loop = command and subprocess.Popen(
        ["sh", "-c", f"while :; do {command}; done >/dev/null 2>&1"], start_new_session=True)
    try:
        yield
    finally:
        if loop:
            os.killpg(loop.pid, signal.SIGKILL)
            loop.wait()


class Run:
    """One proxy in one scenario, measured in the network namespace that this process is in."""

    def __init__(self, spec: Json) -> None:
        self.spec = spec
        self.dir = spec["dir"]
        self.options = objects.Options.parse(spec["gen"])
        made = objects.generate(self.options)
        self.services = [s for s in made["services"] if s["spec"]["ports"][0]["protocol"] == "TCP"]
        self.targets: list[tuple[str, int]] = []
        self.slices: list[str] = []
        by_service: dict[tuple[str, str], list[Json]] = {}
        self.proxy: Process | None = None
        self.server: subprocess.Popen[bytes] | None = None
        for item in made["endpointslices"]:
            key = item["metadata"]["namespace"], item["metadata"]["labels"]["kubernetes.io/service-name"]
            by_service.setdefault(key, []).append(item)
        for service in self.services:
            meta = service["metadata"]
            first = by_service[meta["namespace"], meta["name"]][0]
            if first["endpoints"]:
                self.targets.append((service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]))
                self.slices.append(f"{meta['namespace']}/{first['metadata']['name']}")
        self.new_addresses = (
            f"10.{192 + n // 65025 % 64}.{n // 255 % 255}.{n % 255}" for n in itertools.count(1000)
        )
        self.rng = random.Random(self.options.seed)
        self.result: Json = {k: spec[k] for k in ("proxy", "mode", "min_sync", "round")}
        self.result.update(services=self.options.services, endpoints=self.options.endpoints, gen=spec["gen"])

    def log(self, text: str) -> None:
        print(f"  [{time.monotonic() - self.t0:7.1f}s] {text}", file=sys.stderr, flush=True)

    def setup(self) -> None:
        self.t0 = time.monotonic()
        # an interface that leads nowhere, for the routes to point at; not every kernel has dummy
        dummy = subprocess.run(shlex.split("ip link add kb0 type dummy"), capture_output=True, check=False)
        if dummy.returncode:
            sh("ip link add kb0 type veth peer name kb1")
            sh("ip link set kb1 up")
        for command in (
                "ip link set lo up", "ip link set kb0 arp off", "ip link set kb0 up",
                f"ip addr add {objects.CLIENT_POD}/32 dev kb0", "ip addr add 192.0.2.1/32 dev kb0",
                f"ip route add default dev kb0 src {objects.CLIENT_POD}",
                f"ip route add local {objects.CLUSTER_CIDR} dev lo"):
            sh(command)
        for name, value in (("ip_local_port_range", "10300 65535"), ("tcp_max_syn_backlog", "4096")):
            with open(f"/proc/sys/net/ipv4/{name}", "w") as f:
                f.write(value)
        self.prober = Prober()
        self.generation = nftables_monitor.Generation()
        with open(f"{self.dir}/apiserver.log", "wb") as log:
            server = self.server = subprocess.Popen(
                [sys.executable, "-m", "kproxy_conformance.apiserver", "--gen", self.spec["gen"],
                 "--watch-list", self.spec["watch_list"]], stdout=subprocess.PIPE, stderr=log)
        assert server.stdout is not None
        self.master = server.stdout.readline().decode().strip()
        self.api = Api(self.master)
        self.api.encode_all()
        config: Json = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "mode": self.spec["mode"], "hostnameOverride": objects.NODE,
            "clientConnection": {"kubeconfig": self.kubeconfig()},
            "clusterCIDR": objects.CLUSTER_CIDR, "detectLocalMode": "ClusterCIDR",
            "metricsBindAddress": f"127.0.0.1:{METRICS_PORT}",
            "healthzBindAddress": f"127.0.0.1:{HEALTHZ_PORT}",
            # 0 leaves the machine-wide conntrack settings alone
            "conntrack": {"maxPerCore": 0, "min": 0,
                          "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "iptables": {"minSyncPeriod": self.spec["min_sync"], "syncPeriod": "30s"},
            "nftables": {"minSyncPeriod": self.spec["min_sync"], "syncPeriod": "30s"},
        }
        for item in self.spec["set"]:
            path, value = item.split("=", 1)
            at = config
            *parents, last = path.split(".")
            for key in parents:
                at = at.setdefault(key, {})
            at[last] = yaml.safe_load(value)
        with open(f"{self.dir}/config.yaml", "w") as f:
            yaml.safe_dump(config, f)

    def kubeconfig(self) -> str:
        """Write a kubeconfig if the run uses one, and return its path."""
        if not self.spec["kubeconfig"]:
            return ""
        path = f"{self.dir}/kubeconfig"
        with open(path, "w") as f:
            yaml.safe_dump({
                "apiVersion": "v1", "kind": "Config", "current-context": "bench",
                "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
                "clusters": [{"name": "bench", "cluster": {"server": self.master}}],
                "users": [{"name": "bench", "user": {"token": "bench"}}]}, f)
        return path

    def start_proxy(self) -> Process:
        values = {"config": f"{self.dir}/config.yaml", "master": self.master, "node": objects.NODE,
                  "mode": self.spec["mode"]}
        self.proxy = Process([part.format(**values) for part in shlex.split(self.spec["command"])],
                             f"{self.dir}/proxy.log")
        return self.proxy

    @property
    def running(self) -> Process:
        """The proxy, which has been started."""
        assert self.proxy is not None
        return self.proxy

    def check_alive(self) -> None:
        if not self.running.alive():
            status = self.running.popen.returncode
            raise RuntimeError(f"the proxy ended with status {status}; see {self.dir}/proxy.log")

    def initial(self) -> bool:
        """Measure from the start of the process until every Service can be connected to."""
        n = len(self.targets)
        sample = sorted({round(i * (n - 1) / 63) for i in range(64)}) if n > 64 else list(range(n))
        t0 = self.start_proxy().started
        deadline = t0 + self.spec["timeout"]
        first_gen = last = self.generation.get()
        first_commit = None
        poll = self.spec["detect"] == "probe"
        last_probe = t0
        while True:
            now = time.monotonic()
            if now > deadline:
                self.result["initial"] = {"timed_out_after_s": self.spec["timeout"],
                                          "cpu_s": self.running.cpu()}
                self.result["memory_peak"] = self.running.memory()
                return False
            current = self.generation.get()
            if current != first_gen and first_commit is None:
                first_commit = now - t0
            if current != last or now - last_probe > (0.02 if poll else 0.5):
                last, last_probe = current, now
                if all(self.prober.connect(*self.targets[i])[0] for i in sample):
                    break
                self.check_alive()
            time.sleep(0.003)
        programmed = now - t0
        cpu, memory = self.running.cpu(), self.running.memory()
        self.log(f"sample of {len(sample)} services connects after {programmed:.2f} s")
        missing = [t for t in self.targets if not self.prober.connect(*t)[0]]
        missed_first = len(missing)
        while missing and time.monotonic() < deadline:
            missing = [t for t in missing if not self.prober.connect(*t)[0]]
            programmed = time.monotonic() - t0
            time.sleep(0.02)
        self.settle()
        values = metrics()
        self.result["initial"] = {
            "programmed_s": round(programmed, 3), "first_commit_s": round(first_commit or 0, 3),
            "late_services": missed_first, "missing_services": len(missing),
            "cpu_s": round(cpu, 2), "cpu_settled_s": round(self.running.cpu(), 2),
            "sync": sync_metrics({}, values)}
        self.result["memory_initial"] = memory
        self.result["memory_settled"] = self.running.memory()
        return True

    def settle(self, quiet: float = 2.0, limit: float = 60.0) -> None:
        """Wait until the proxy neither commits nor computes for a while."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            before = self.generation.get(), self.running.cpu()
            time.sleep(quiet)
            if self.generation.get() == before[0] and self.running.cpu() - before[1] <= 0.05 * quiet:
                return

    def connect(self) -> None:
        """Measure the latency of connect() through Services at given places in the list, and connections a
        second."""
        n = len(self.targets)
        direct = ("10.128.9.9", objects.TARGET_PORT)
        places = {"direct": direct, "first": self.targets[0], "middle": self.targets[n // 2],
                  "last": self.targets[-1]}
        times: dict[str, list[float]] = {name: [] for name in (*places, "random")}
        failures = 0
        for _ in range(self.spec["connects"]):
            for name, target in (*places.items(), ("random", self.rng.choice(self.targets))):
                reached, took = self.prober.connect(*target, timeout=1.0)
                failures += reached is None
                times[name].append(took)
        rates = {}
        some = self.rng.sample(self.targets, min(n, 1000))
        for name, targets in (("direct", [direct]), ("services", some)):
            best = []
            for _ in range(3):
                count, end = 0, time.monotonic() + 1.0
                for target in itertools.cycle(targets):
                    count += self.prober.connect(*target, timeout=1.0)[0] is not None
                    if time.monotonic() > end:
                        break
                best.append(count)
            rates[name] = statistics.median(best)
        self.result["connect"] = {"failures": failures, "connections_per_s": rates,
                                  **{k + "_us": summary(v, 1e6, 1) for k, v in times.items()}}

    def drain(self, monitor: nftables_monitor.Monitor, done: Callable[[], bool], deadline: float) -> None:
        """Read notifications until done() or the deadline (no sleep: wakes on the kernel's message)."""
        while not done() and time.monotonic() < deadline:
            select.select([monitor], [], [], 0.2)
            monitor.poll()

    def incremental(self) -> None:
        """Measure one EndpointSlice change at a time: from the change at the server to the kernel's
        commit."""
        monitor = nftables_monitor.Monitor()
        before, cpu0 = metrics(), self.running.cpu()
        latencies: list[float] = []
        timeouts = unverified = 0
        gap = self.spec["gap"]
        stop = time.monotonic() + self.spec["incremental_limit"]
        for number in range(self.spec["changes"]):
            time.sleep(self.rng.uniform(0, gap))
            monitor.poll()
            at = self.rng.randrange(len(self.slices))
            address = next(self.new_addresses)
            monitor.wait_for(address)
            began = self.api.call("POST", "/bench/set", {"ops": [
                {"slice": self.slices[at], "index": 0, "address": address}]})["times"][0]
            if self.spec["detect"] == "probe":
                while time.monotonic() < began + 120:
                    if any(self.prober.connect(*self.targets[at])[0] == address for _ in range(10)):
                        monitor.seen[address] = time.monotonic()
                        break
                    time.sleep(0.001)
            else:
                self.drain(monitor, partial(monitor.has_seen, address), began + 120)
            if address not in monitor.seen:
                timeouts += 1
                self.check_alive()
                if timeouts >= 3:
                    break
                continue
            latencies.append(monitor.seen[address] - began)
            if number % 10 == 0 and self.options.endpoints <= 100:
                unverified += not any(self.prober.connect(*self.targets[at])[0] == address
                                      for _ in range(20 * self.options.endpoints))
            if time.monotonic() > stop:
                break
        cpu = self.running.cpu() - cpu0
        self.result["incremental"] = {
            "latency_ms": summary(latencies, 1e3, 2), "timeouts": timeouts,
            "not_seen_by_probe": unverified,
            "cpu_ms_per_change": round(cpu * 1e3 / max(1, len(latencies)), 1), "commits": monitor.commits,
            "notifications_lost": monitor.lost, "sync": sync_metrics(before, metrics())}
        monitor.close()

    def churn(self, rate: float, beside: str = "") -> None:
        """Make *rate* endpoint changes a second for a while: how far behind does the kernel fall?

        The command *beside* runs again and again meanwhile.
        """
        seconds = self.spec["churn_seconds"]
        order = list(range(len(self.slices)))
        self.rng.shuffle(order)
        per_slice: dict[int, int] = {}
        ops: list[Json] = []
        per = max(1, min(self.options.endpoints, objects.MAX_PER_SLICE))
        for at in itertools.islice(itertools.cycle(order), int(rate * seconds)):
            index = per_slice.get(at, 0)
            per_slice[at] = index + 1
            ops.append({"slice": self.slices[at], "index": index % per, "address": next(self.new_addresses)})
        monitor = nftables_monitor.Monitor()
        for op in ops:
            monitor.wait_for(op["address"])
        before, cpu0, began = metrics(), self.running.cpu(), time.monotonic()
        self.api.call("POST", "/bench/churn", {"ops": ops, "rate": rate})
        limit = began + seconds + 90
        with repeated(beside.format(frontend="{}:{}".format(*self.targets[0]))):
            self.drain(monitor, lambda: False, began + seconds)
        pushed_cpu = self.running.cpu() - cpu0
        after = metrics()
        # changes that a later one to the same endpoint undid before the proxy got to them are never seen
        final: dict[tuple[str, int], str] = {}
        for op in ops:
            final[op["slice"], op["index"]] = op["address"]
        self.drain(monitor, lambda: all(a in monitor.seen for a in final.values()), limit)
        caught_up = time.monotonic()
        state = self.api.call("GET", "/bench/churn")
        times = dict(zip((op["address"] for op in ops), state["times"], strict=True))
        lags = [monitor.seen[a] - t for a, t in times.items() if a in monitor.seen]
        missing = sum(a not in monitor.seen for a in final.values())
        name = f"{rate:g}/s beside {beside}" if beside else f"{rate:g}/s"
        self.result.setdefault("churn", {})[name] = {
            "seconds": seconds, "changes": len(ops), "lag_ms": summary(lags, 1e3, 1),
            "superseded": len(ops) - len(lags) - missing, "missing": missing,
            "caught_up_after_s": round(caught_up - max(state["times"]), 2),
            "cpu_s": round(pushed_cpu, 2), "commits": monitor.commits, "notifications_lost": monitor.lost,
            "sync": sync_metrics(before, after)}
        monitor.close()
        self.settle(limit=20)

    def restart(self) -> None:
        """Start the proxy again over its rules: time to the first sync, and connections lost."""
        self.running.stop()
        t0, lost, tries = self.start_proxy().started, 0, 0
        next_look = 0.0
        while True:
            now = time.monotonic()
            if now > next_look:
                next_look = now + 0.1
                if metrics().get("kubeproxy_sync_proxy_rules_duration_seconds_count", 0) >= 1:
                    break
                if now - t0 > self.spec["timeout"]:
                    break
                self.check_alive()
            tries += 1
            lost += self.prober.connect(*self.rng.choice(self.targets))[0] is None
            time.sleep(0.005)
        self.result["restart"] = {"first_sync_s": round(now - t0, 2), "cpu_s": round(self.running.cpu(), 2),
                                  "connects": tries, "connects_lost": lost,
                                  "sync": sync_metrics({}, metrics())}

    def count(self) -> None:
        """Count what is in the kernel: lines of the listing by kind, and how long the listing takes."""
        out: Json = {}
        for name, command in (("nft", "nft list ruleset"), ("iptables", "iptables-save")):
            if (name == "iptables") != (self.spec["mode"] == "iptables"):
                continue
            start = time.monotonic()
            try:
                text = subprocess.run(
                    shlex.split(command), capture_output=True, text=True, timeout=120, check=False
                ).stdout
            except (OSError, subprocess.TimeoutExpired):
                continue
            lines = [line.strip() for line in text.splitlines()]
            out = {"listing_s": round(time.monotonic() - start, 2), "listing_lines": len(lines),
                   "chains": sum(line.startswith(("chain ", ":")) for line in lines),
                   "rules_iptables": sum(line.startswith("-A ") for line in lines),
                   "sets_and_maps": sum(line.startswith(("set ", "map ")) for line in lines)}
        self.result["kernel"] = out

    def measure_all(self) -> Json:
        """Measure every phase; a failure is in the result, beside what was measured until then."""
        try:
            self.setup()
            if self.initial():
                for phase in self.spec["phases"]:
                    self.log(phase)
                    if phase == "churn":
                        for rate, beside in itertools.product(self.spec["rates"], self.spec["beside"]):
                            self.churn(rate, beside)
                    else:
                        getattr(self, phase)()
                self.result["memory_end"] = self.running.memory()
        except Exception as e:  # noqa: BLE001 - a result with what was measured is better than none
            self.result["error"] = f"{type(e).__name__}: {e}"
            self.log(self.result["error"])
        finally:
            if self.proxy is not None:
                self.proxy.stop()
            if self.server is not None:
                self.server.terminate()
                self.server.wait()
        return self.result

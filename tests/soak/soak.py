"""A node under churn, damage, restarts, switches of modes and an API server that fails, used all the time.

The first half starts kproxy in each mode, kills and ends it among the other events, and then compares the
kernel with the one that a fresh start makes. The second half keeps one process, takes it through all modes
lap by lap, and compares what the process holds after the second and after the last laps.
"""

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import yaml

from kproxy_conformance.checks.kernel_state import difference
from kproxy_core.model.timing import LONGEST
from tests.soak.api import Churn
from tests.soak.damage import DAMAGES, UNANNOUNCED, WHILE_ENDED, Damage, Node
from tests.soak.ledger import Ledger, Window, leaks
from tests.soak.moments import Moment, now
from tests.soak.objects import MARK, Objects
from tests.soak.proxy import REPAIRED, Proxy, SoakFailed
from tests.switch.room import FROM_CLIENT, FROM_NODE, Failure, Load, Room
from tests.switch.witness import Witness

MODES = ("nftables", "iptables", "userspace", "ebpf")
SHORTEST_TIMEOUT = 0.2
"""Seconds: TCP_RTO_MIN."""
MARKED = 1.0
"""Seconds between two changes to a Service that show whether watches deliver."""
RETIREMENT = 180.0
"""Seconds after which relays of clients that are gone have ended: by keep-alive, or unsent data given up."""
REPAIR_PATIENCE = 120.0
"""Seconds after which a damage counts as unnoticed."""

_TAKE = """
from kproxy_conformance.checks.kernel_state import Reader
print(*Reader().read().in_use, sep="\\n")
"""
_LEARNT = re.compile(r"set affinity|map affinity|\baffinity-\S+ element")
"""Lines of a kernel's state that clients cause."""
_VARIABLE = re.compile(
    r"(?<=redirect to :)\d+|(?<=KUBE-NODEPORT-NON-LOCAL ).*? dport \d+|(?<= \. )\d+(?= : )")
"""Ports of relays, and the places of endpoints among those of a service port."""

_CONNTRACK = {
    **dict.fromkeys((
        "tcp_timeout_syn_sent", "tcp_timeout_syn_recv", "tcp_timeout_fin_wait", "tcp_timeout_close_wait",
        "tcp_timeout_last_ack", "tcp_timeout_time_wait", "tcp_timeout_close", "tcp_timeout_unacknowledged",
    ), 3),
    "udp_timeout": 5,
    "udp_timeout_stream": 8,
}  # fmt: skip
"""Seconds: ended connections are forgotten before the tracked ones are counted."""

MEMORY_GROWTH, MEMORY_SLACK = 0.05, 4 << 20
LAPS = 4
"""Least number of laps. Imports and heaps grow in the first one."""


class Soak:
    """The node, everything around it, and the events."""

    def __init__(self, stack: ExitStack, directory: Path, modes: Sequence[str], rate: float, seed: int,
                 cgroup: Path, pins: Path) -> None:
        self.ledger = Ledger()
        self._started = time.monotonic()
        self.modes = modes
        self.rng = random.Random(seed)
        self._directory = directory
        room = Room(stack, directory, sockets=False)
        room.choose_iptables("nft")
        self.node = room.node
        for name, seconds in _CONNTRACK.items():
            self.node.run("sysctl", "-qw", f"net.netfilter.nf_conntrack_{name}={seconds}")
        # A client whose translation was flushed can't tell its relay that it has ended.
        self.node.run("sysctl", "-qw", "net.ipv4.tcp_keepalive_intvl=1", "net.ipv4.tcp_keepalive_probes=3")
        dialled = list(yaml.safe_load_all((room.manifests / "all.yaml").read_text()))
        objects = Objects(filter(None, dialled), random.Random(seed + 1))
        self.churn = Churn(objects, self.node, directory / "api", rate)
        stack.callback(self.churn.close)
        options = {
            "userspace": {"udpIdleTimeout": "5s", "syncPeriod": "2s"},
            "ebpf": {"cgroup": str(cgroup), "pinDirectory": str(pins)},
        }
        self.proxy = Proxy(self.node, directory, {
            "clusterCIDR": "10.244.0.0/16,fd00:10:244::/48", "conntrack": {
                "maxPerCore": 0, "tcpEstablishedTimeout": "10s", "tcpCloseWaitTimeout": "3s",
            },
            "kproxy": {
                "stateDirectory": str(directory / "state"), "liveModeSwitch": True, "backendOptions": options,
                "ownTables": "never",  # Else nobody could damage them.
            },
        }, self.churn.url)  # fmt: skip
        self._damaged = Node(self.node, self.proxy, pins, self.rng, self.churn.paused)
        self._queues: dict[str, list[str]] = {}
        self._room = room
        self._loads: list[Load] = []

    def run(self, seconds: float) -> None:
        """Run for about *seconds*."""
        started = self._started
        self.proxy.configure(self.modes[0])
        self.proxy.start()
        self._loads = [
            Load(["ip", "netns", "exec", where.name], targets, counted=True)
            for where, targets in ((self._room.client, FROM_CLIENT), (self.node, FROM_NODE))
        ]
        for load, targets in zip(self._loads, (FROM_CLIENT, FROM_NODE), strict=True):
            load.wait_for(2 * len(targets))
        hosts = (self.node, self._room.client, *self._room.pods)
        witness = Witness(
            hosts, self._loads, self._directory, lambda failure: not self.ledger.outside([failure]))
        try:
            self._restarts(seconds * 0.45 / len(self.modes))
            self._laps(started + seconds)
        finally:
            witness.close()
            for load in self._loads:
                load.end()
        self._finish()

    @property
    def failures(self) -> list[Failure]:
        """The connections that failed, without those for which the machine had no time.

        A segment that was sent again although its answer arrived sooner than any timeout was a probe.
        """
        stalls = [stall for load in self._loads for stall in load.stalls]
        return [
            failure for load in self._loads for failure in load.failures
            if not (failure.sent_again and (
                failure.until - failure.since < SHORTEST_TIMEOUT
                or any(failure.overlaps(*stall) for stall in stalls)
            ))
        ]  # fmt: skip

    # The two halves ------------------------------------------------------------------------

    def _restarts(self, seconds: float) -> None:
        """Spend *seconds* in each mode, with restarts, and compare the kernel with that of a fresh start."""
        for number, mode in enumerate(self.modes):
            if number:
                self._switch(mode)
            until = time.monotonic() + seconds
            actions = {**self._peaceful, **self._ends}
            while time.monotonic() < until:
                self._act("restarts", actions)
            self._compare_with_fresh(mode)

    def _laps(self, until: float) -> None:
        """Keep one process until then, and measure it after each lap."""
        self._switch(self.modes[0])
        self._restart("SIGTERM", damaged=False)
        dwell = max(2.0, min(25.0, (until - time.monotonic()) / len(self.modes) / (LAPS + 1)))
        usages = self.ledger.usages
        while time.monotonic() < until or len(usages) < LAPS:
            for mode in (*self.modes[1:], self.modes[0]):
                self._switch(mode)
                end = time.monotonic() + dwell
                while time.monotonic() < end:
                    self._act("laps", self._peaceful)
            with self.churn.paused():
                self.proxy.wait_until_retired(RETIREMENT)
                self._await_rest()
                usages.append(self.proxy.usage())
        self.ledger.problems += leaks(usages, growth=MEMORY_GROWTH, slack=MEMORY_SLACK)

    def _finish(self) -> None:
        """Check what is left at the end."""
        ledger, outside = self.ledger, self.ledger.outside(self.failures)
        seconds = time.monotonic() - self._started
        first: dict[str, Failure] = {}
        for failure in outside:
            first.setdefault(failure.what, failure)
        ledger.problems += [
            f"outside of damage, first at {failure.since - self._started:.2f} to "
            f"{failure.until - self._started:.2f} s: {what}"
            for what, failure in first.items()
        ]
        self._await_forgotten_connections()
        with self.churn.paused():
            self._await_rest()
            self._check_full_sync()
        ended = self.proxy.terminate()
        ledger.problems += self.proxy.problems
        ledger.problems += [
            f"{each.mode}: repaired after {each.seconds:.3f} s, pressure {each.pressure:.0%}: {each.what}"
            for each in ledger.slow()
        ]
        shown = [ledger.usages[1], *ledger.usages[-2:]]
        stalled = sum(until - since for load in self._loads for since, until in load.stalls)
        ledger.totals |= {
            "duration, s": round(seconds),
            "connections and flows": sum(load.made for load in self._loads),
            "answers on lasting ones": sum(load.exchanged for load in self._loads),
            "failed in damage windows": len(self.failures) - len(outside),
            "failed outside": len(outside),
            "damages judged by the length of their repair": len(ledger.judged()),
            "their repair, ms: p50, p99, longest": ledger.repair_times(),
            "changes of objects": self.churn.changes,
            "starts of kproxy": self.proxy.starts,
            "laps of one process, measured after the second and the last two": len(ledger.usages),
            "its memory, MiB": ", ".join(f"{usage.rss / 2**20:.1f}" for usage in shown),
            "its descriptors": ", ".join(str(usage.descriptors) for usage in shown),
            "its threads": ", ".join(str(usage.threads) for usage in shown),
            "its last end, s": round(ended, 2),
            "seconds in which the machine stalled": round(stalled, 1),
        }

    # Events ----------------------------------------------------------------------------------

    @property
    def _peaceful(self) -> Mapping[str, Callable[[], None]]:
        """Events that a running process sees, by name."""
        actions: dict[str, Callable[[], None]] = {
            "API server restarts": lambda: self._undisturbed(
                "API server restarts", lambda: self.churn.go_away(self.rng.uniform(0, 2), self.rng)),
            "API server hangs": lambda: self._undisturbed(
                "API server hangs", lambda: self.churn.hang(self.rng.uniform(0.5, 2))),
            "watches expire": lambda: self._undisturbed("watches expire", self.churn.forget_history),
        }  # fmt: skip
        for kind, damage in DAMAGES[self.proxy.mode].items():
            actions[kind] = lambda kind=kind, damage=damage: self._damage(kind, damage)  # type: ignore[misc]
        return actions

    @property
    def _ends(self) -> Mapping[str, Callable[[], None]]:
        return {
            "SIGKILL": lambda: self._restart("SIGKILL", damaged=False),
            "SIGTERM": lambda: self._restart("SIGTERM", damaged=False),
            "SIGKILL, then damage": lambda: self._restart("SIGKILL, then damage", damaged=True),
        }

    def _act(self, part: str, actions: Mapping[str, Callable[[], None]]) -> None:
        """Do the next of *actions*: each once in a random order, then again."""
        queue = self._queues.setdefault(f"{part} {self.proxy.mode}", [])
        if not queue:
            queue += self.rng.sample(list(actions), len(actions))
        actions[queue.pop()]()
        time.sleep(self.rng.uniform(0.3, 0.8))

    @contextmanager
    def _window(self, kind: str, *, may_fail: bool) -> Iterator[None]:
        """Note the time that the block takes."""
        mode, since = self.proxy.mode, now()
        yield
        self._note(Window(mode, kind, since.at, now().at, may_fail), since)

    def _note(self, window: Window, since: Moment) -> None:
        """Add *window*, which began at *since*, to the ledger."""
        pressure = now().pressure_since(since)
        self.ledger.windows.append(window._replace(pressure=pressure))
        print(
            f"{window.since - self._started:7.2f} {window.mode}: {window.kind}: "
            f"{1000 * window.seconds:.0f} ms, pressure {pressure:.0%} {window.what}", flush=True,
        )  # fmt: skip

    def _undisturbed(self, kind: str, event: Callable[[], None]) -> None:
        with self._window(kind, may_fail=False):
            event()

    def _damage(self, kind: str, damage: Damage) -> None:
        done = damage(self._damaged)
        if done.since is None:
            return
        since, at, last = done.since, done.since.at, (done.again or done.since).at
        try:
            self.proxy.wait_for(
                f"repair of {done}", lambda: done.families <= self._repaired(last), REPAIR_PATIENCE)
        except SoakFailed as error:
            self.ledger.problems.append(f"{self.proxy.mode}: {error}")
        window = Window(self.proxy.mode, kind, at, now().at, may_fail=True, what=done.what,
                        is_noticed=kind not in UNANNOUNCED)
        self._note(window, since)
        if kind == "kill worker":  # lasting UDP flows find another endpoint with their next datagram
            with self._window("flows of a killed worker", may_fail=True):
                for load in self._loads:
                    load.renew()

    def _repaired(self, since: float) -> set[str]:
        """Return the labels of the families that were repaired by a sync that began after *since*."""
        return {
            entry.fields["ip_family"] for entry in self.proxy.entries(since)
            if entry.message in REPAIRED and entry.at - entry.fields["seconds"] >= since
        }

    def _restart(self, kind: str, *, damaged: bool) -> None:
        relays = self.proxy.mode == "userspace"
        with self._window(kind, may_fail=damaged or relays):
            if kind.startswith("SIGKILL"):
                self.proxy.kill()
            else:
                self.proxy.terminate()
            if damaged:
                self.rng.choice(WHILE_ENDED)(self._damaged)
            self.proxy.start()

    def _switch(self, mode: str) -> None:
        """Change the mode by command or by the file."""
        if mode == self.proxy.mode:
            return
        with self._window(f"switch to {mode}", may_fail=False):
            before = time.monotonic()
            if self.rng.random() < 0.5:
                self.proxy.switch(mode)
                self.proxy.configure(mode)
            else:
                self.proxy.configure(mode)
            self.proxy.wait_for(f"mode {mode}", lambda: any(
                entry.message == "switched modes" and entry.fields.get("after") == mode
                for entry in self.proxy.entries(before)))  # fmt: skip
            for load in self._loads:  # relays end with the process
                load.renew()

    # Checks ----------------------------------------------------------------------------------

    def _await_rest(self) -> None:
        """Wait until every object is programmed and no sync follows. Call while the churn is paused."""
        for mark in (self.churn.mark_service, self.churn.mark_endpoints):
            self._await_watch(mark)
        self.proxy.wait_for("rest", lambda: not any(
            "scope" in entry.fields for entry in self.proxy.entries(time.monotonic() - 1)))  # fmt: skip

    def _await_watch(self, mark: Callable[[int], None]) -> None:
        """Wait until a change by *mark* arrives alone: its kind is followed, and all before was synced.

        A watch that ended several times soon after its start is away for `LONGEST` seconds.
        """
        for number in count(1):
            try:
                self._await_mark(mark, number, MARKED, is_alone=True)
                break
            except SoakFailed:
                if number * MARKED > 2 * LONGEST:
                    raise
        # Equal to that of other comparisons. An earlier event of the other kind's watch may still join it.
        self._await_mark(mark, 0, LONGEST, is_alone=False)

    def _await_mark(
        self, mark: Callable[[int], None], number: int, seconds: float, *, is_alone: bool
    ) -> None:
        since = time.monotonic()
        mark(number)

        def is_programmed() -> bool:
            programmed = [entry.fields.get("names", ()) for entry in self.proxy.entries(since)]
            return [MARK] in programmed if is_alone else any(MARK in names for names in programmed)

        self.proxy.wait_for("programmed change", is_programmed, seconds)

    def _check_full_sync(self) -> None:
        """Check that a full sync finds nothing to write: the first one of another process.

        Relays listen on other ports then.
        """
        if self.proxy.mode == "userspace":
            return
        self.proxy.kill()
        self.proxy.start()
        self.ledger.problems += [
            f"{self.proxy.mode}: a full sync at rest wrote something: {entry.fields}"
            for entry in self.proxy.entries(0)
            if entry.message == "first sync" and entry.fields["operations"]
        ]

    def _compare_with_fresh(self, mode: str) -> None:
        """Compare the kernel with what a start on a clean node makes of the same objects."""
        with self.churn.paused():
            self._await_rest()
            self._check_full_sync()
            before = self._kernel_state()
            with self._window("removal and new start", may_fail=True):
                self.proxy.terminate()
                self.proxy.clean_up()
                self.proxy.start()
            self._await_rest()
            if changes := difference(before, self._kernel_state()):
                self.ledger.problems.append(
                    f"{mode}: the kernel differs from that of a fresh start:\n{changes}")

    def _kernel_state(self) -> list[str]:
        lines = self.node.run(sys.executable, "-B", "-c", _TAKE).splitlines()
        return [_VARIABLE.sub("#", re.sub(" +", " ", line)) for line in lines if not _LEARNT.search(line)]

    def _await_forgotten_connections(self) -> None:
        """Check that connection tracking forgets everything after the clients have ended."""
        deadline = time.monotonic() + 30
        while (tracked := self._tracked()) and time.monotonic() < deadline:
            time.sleep(0.5)
        self.ledger.totals["tracked connections at the end"] = len(tracked)
        if tracked:
            self.ledger.problems.append(f"{len(tracked)} connections are still tracked: {tracked[:5]}")

    def _tracked(self) -> list[str]:
        """Return the tracked connections through Services."""
        found = [
            line
            for family in ("ipv4", "ipv6")
            for line in subprocess.run(
                ["ip", "netns", "exec", self.node.name, "conntrack", "-L", "-f", family],
                capture_output=True, text=True, check=True).stdout.splitlines()
        ]  # fmt: skip
        lasting = [line for line in found if line.startswith("udp") or " ESTABLISHED " in line]
        return [line for line in lasting if "src=127.0.0.1" not in line]

"""Run lanes of tests side by side: ``python -m tests.lanes [LANE...]``; `make check`, `make test` and
`make gate` do.

A lane is a process with an own log, because most of what tests do with packets is waiting. Progress is
printed as lanes start, move on and end; the last line is ``N passed, N failed``. The exit status is 1 if
anything failed.
"""

import compileall
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kproxy_conformance.network.patience import PATIENCE, patience

CHECKOUT = Path(__file__).parents[1]
MODULES = CHECKOUT / "tests" / "guest" / "modules"
EACH_PROCESSOR = 3
"""Lanes that run at a time for each processor: most wait most of the time."""
MOST_FOR_EACH_PROCESSOR = 5
"""Lanes that run at a time while processors are idle nevertheless."""
IDLE = 0.1
"""Part of their time: if they were idle for more, over `WATCHED` seconds, one more lane is started."""
WATCHED = 8.0
"""Seconds."""
BESIDE_OTHERS = 0.5
"""What a lane with guests counts for: guests have a lower priority, and take the time that others leave."""
REPEATED = 40
"""Lines at the end of a failed lane's log that are printed again after all lanes: pytest's summary."""
REPORTED = 20.0
"""Seconds between two reports of progress."""

_CODE = ("kproxy_core", "plugins", "bpf", "conformance", "tests", "examples")
_NOT_IN_A_GUEST = ("-m", "not in_a_guest")
_MODES = ("iptables", "userspace", "iptables-legacy", "nftables-through-api", "nftables", "ebpf")
_TOURS = "tests/switch/test_switch.py"


@dataclass(frozen=True, slots=True)
class Lane:
    """Some of the tests."""

    name: str
    arguments: tuple[str, ...]
    """For pytest; another program with its arguments if *is_program*."""
    is_program: bool = False
    in_a_guest: bool = False

    def command(self) -> list[str]:
        if self.is_program:
            return list(self.arguments)
        pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5")
        return [*pytest, *self.arguments]

    @property
    def share(self) -> float:
        """Its share of the lanes that may run at a time."""
        return BESIDE_OTHERS if self.in_a_guest else 1.0


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _scenarios(mode: str, parts: int) -> list[Lane]:
    """Return the lanes for the scenarios of *mode*, which are divided into *parts*."""
    selected = ("tests/conformance", "-k", _of_a_mode(mode))
    return [Lane(mode, (*selected, f"--part={part}/{parts}")) for part in range(1, parts + 1)]


def _of_a_mode(*modes: str) -> str:
    """Return the expression for pytest that selects the tests of *modes* by their ids."""
    return " or ".join(f"{mode}-{family}" for mode in modes for family in ("ipv4", "ipv6"))


LINT = (
    Lane("lint", (_program("ruff"), "check", *_CODE), is_program=True),
    Lane("types", (_program("mypy"), *_CODE), is_program=True),
)
TEST = (
    *LINT,
    Lane("core", ("tests/core", "--part=2/2")),
    Lane("kit", ("tests/kit", *_NOT_IN_A_GUEST)),
    Lane("plugins", ("tests/plugins", *_NOT_IN_A_GUEST, "--part=1/2")),
    Lane("plugins", ("tests/plugins", *_NOT_IN_A_GUEST, "--part=2/2")),
    Lane("switch", ("tests/switch", f"--ignore={_TOURS}", *_NOT_IN_A_GUEST)),
    Lane("switch", (_TOURS, *_NOT_IN_A_GUEST)),
    Lane("core", ("tests/core", "--part=1/2")),  # pytest has compiled these tests by then
    *_scenarios("iptables", 2),
    *_scenarios("userspace", 1),
    *_scenarios("iptables-legacy", 1),
    Lane("leftovers", ("tests/leftovers", *_NOT_IN_A_GUEST)),
    Lane("deploy", ("tests/deploy", *_NOT_IN_A_GUEST)),
    Lane("rest", ("tests/rooms", "tests/examples", "tests/guest", "tests/nft_releases", "tests/conformance",
                  *_NOT_IN_A_GUEST, "-k", f"not ({_of_a_mode(*_MODES)})")),
    *_scenarios("nftables-through-api", 1),
    *_scenarios("nftables", 2),
    *_scenarios("ebpf", 2),
    Lane("fleet", ("tests/fleet",)),
    Lane("shortage", ("tests/shortage", *_NOT_IN_A_GUEST)),
)  # fmt: skip
"""Lanes of `make test`; those that take longest come first."""
GATE = (
    Lane("ipvs", ("tests/plugins/ipvs", "tests/kit", "-m", "in_a_guest"), in_a_guest=True),
    Lane("guest", ("tests/switch", "tests/leftovers", "tests/guest", "tests/shortage", "tests/deploy",
                   "tests/plugins/nftables", "-m", "in_a_guest"),
         in_a_guest=True),
    Lane("ebpf-in-guest", ("tests/plugins/ebpf", "-m", "in_a_guest"), in_a_guest=True),
    Lane("install", ("tests/install",)),
    Lane("soak", ("tests/soak",)),
    Lane("browser", ("tests/browser",)),
)  # fmt: skip
"""Lanes of `make gate`: what a change rarely breaks, or only a guest's kernel can play."""
ALL = (*TEST, *GATE)
"""Every test, in one lane each."""
CHECK = (
    *LINT,
    *(Lane("nftables", ("tests/conformance", "-k", "test_scenario and nftables-ipv4", f"--part={part}/3"))
      for part in (1, 2, 3)),
    Lane("rooms", ("tests/rooms", "--deselect=tests/rooms/test_lanes.py::test_every_test_is_in_one_lane")),
    Lane("pure", ("tests/core", "tests/plugins", "-m", "pure")),
)  # fmt: skip
"""Lanes to run before every commit."""
VERBS = {"check": CHECK, "test": TEST, "gate": GATE}


@dataclass
class Run:
    """A lane under way, and its result."""

    lane: Lane
    log: Path
    process: "subprocess.Popen[bytes] | None" = None
    began: float = 0.0
    seconds: float = 0.0
    cpu: float = 0.0
    """Seconds of CPU time of its processes, as far as they were waited for."""
    tally: Counter[str] = field(default_factory=Counter)

    def start(self, environment: dict[str, str]) -> None:
        self.began = time.monotonic()
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.lane.command(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=CHECKOUT,
                env=environment,
            )  # fmt: skip

    def has_ended(self) -> bool:
        """Return whether it has ended; then its tally is known."""
        if self.process is None:
            return False
        ended, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if not ended:
            return False
        self.process.returncode = os.waitstatus_to_exitcode(status)  # for Popen, which did not wait
        self.seconds = time.monotonic() - self.began
        self.cpu = usage.ru_utime + usage.ru_stime
        self.tally = tally_of("".join(self._lines()[-1:]))
        if self.lane.is_program:
            self.tally = Counter({"failed" if status else "passed": 1})
        elif status and not self.tally["failed"]:
            self.tally["failed"] += 1  # pytest ended without a summary
        return True

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def position(self) -> str:
        """Return how far it is: the number of tests that have ended."""
        rows = [re.sub(r" *\[ *\d+%\]$", "", line) for line in self._lines()]
        return f"{self.lane.name} at {sum(len(row) for row in rows if re.fullmatch('[.FEs]+', row))}"

    def report(self) -> None:
        passed, failed = self.tally["passed"], self.tally["failed"]
        times = f"{self.seconds:6.0f} s {self.cpu:6.0f} s of CPU"
        print(f"{self.lane.name:22}{passed:5} passed {failed:3} failed {times}", flush=True)
        if failed:
            print("\n".join(self._lines()), flush=True)

    def repeat_failures(self) -> None:
        if self.tally["failed"]:
            print(f"{self.lane.name} failed:", *self._lines()[-REPEATED:], sep="\n", flush=True)


def tally_of(summary: str) -> Counter[str]:
    """Return how many tests passed and failed by pytest's last line; one that did not run has failed."""
    tally: Counter[str] = Counter()
    for number, what in re.findall(r"(\d+) (passed|failed|error|skipped|xfailed|xpassed)", summary):
        tally["passed" if what == "passed" else "failed"] += int(number)
    return tally


class Processors:
    """The processors of this machine, and how much of their time nothing uses."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._total, self._idle = self._ticks()

    def were_idle(self) -> bool:
        """Return whether they were idle for more than `IDLE` of their time; asked too early, False."""
        if time.monotonic() - self._looked < WATCHED:
            return False
        total, idle = self._total, self._idle
        self._looked = time.monotonic()
        self._total, self._idle = self._ticks()
        return self._idle - idle > IDLE * (self._total - total)

    @staticmethod
    def _ticks() -> tuple[int, int]:
        """Return the time since the machine's start, and the idle part of it (proc_stat(5))."""
        processors, *_ = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        states = [int(number) for number in processors.split()[1:9]]
        return sum(states), sum(states[3:5])


def run(lanes: Sequence[Lane], directory: Path) -> Counter[str]:
    """Run *lanes*, and return how many tests passed and failed."""
    # kproxy starts a thousand times: each would compile it again where nothing keeps the bytecode.
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in _CODE:
        compileall.compile_dir(CHECKOUT / name, quiet=1, workers=0)
    # Measured once, while nothing else runs; the lanes share the machine.
    environment[PATIENCE] = f"{EACH_PROCESSOR * patience():.2f}"
    cpus = os.cpu_count() or 1
    at_a_time, at_most = EACH_PROCESSOR * cpus, MOST_FOR_EACH_PROCESSOR * cpus
    processors = Processors()
    waiting = [Run(lane, directory / f"{number}-{lane.name}.log") for number, lane in enumerate(lanes)]
    under_way: list[Run] = []
    ended: list[Run] = []
    began = reported = time.monotonic()
    try:
        while waiting or under_way:
            while waiting:
                shares = sum(run.lane.share for run in (*under_way, waiting[0]))
                if shares > at_a_time and not (shares <= at_most and processors.were_idle()):
                    break
                under_way.append(waiting.pop(0))
                under_way[-1].start(environment)
            time.sleep(0.1)
            for each in [each for each in under_way if each.has_ended()]:
                under_way.remove(each)
                ended.append(each)
                each.report()
            if time.monotonic() - reported > REPORTED and under_way:
                reported = time.monotonic()
                print("  ... " + ", ".join(each.position() for each in under_way), flush=True)
    finally:
        for each in under_way:
            if each.process is not None:
                each.process.terminate()
                each.process.wait()
    slowest = max(ended, key=lambda each: each.seconds)
    cpu = sum(each.cpu for each in ended)
    took = time.monotonic() - began
    print(f"slowest: {slowest.lane.name}, {slowest.seconds:.0f} s; in all {took:.0f} s, {cpu:.0f} s of CPU")
    print(f"logs: {directory}")
    for each in ended:
        each.repeat_failures()
    return sum((each.tally for each in ended), Counter())


def guest_is_available() -> bool:
    """Return whether the guest's modules exist or can be built; say what follows if not."""
    done = subprocess.run([MODULES], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr.strip())
        print("lanes in a guest are left out: without a guest kernel, the mode ipvs, the mode ebpf on an")
        print("older kernel and the loading of kernel modules are not tested")
    return done.returncode == 0


def main() -> int:
    names = sys.argv[1:]
    verb = VERBS.get(" ".join(names) or "test")
    lanes = list(verb) if verb else [lane for lane in ALL if lane.name in names]
    if not lanes:
        known = dict.fromkeys([*VERBS, *(lane.name for lane in ALL)])
        sys.exit(f"no such lane; known are {', '.join(known)}")
    missing = 0
    if any(lane.in_a_guest for lane in lanes) and not guest_is_available():
        lanes = [lane for lane in lanes if not lane.in_a_guest]
        missing = 1 if "CI" in os.environ or not lanes else 0
    directory = Path(tempfile.mkdtemp(prefix="kproxy-lanes-"))
    tally = run(lanes, directory) if lanes else Counter[str]()
    failed = tally["failed"] + missing
    print(f"{tally['passed']} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

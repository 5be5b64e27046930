"""Run lanes of tests side by side: ``python -m tests.lanes VERB [LANE...]``, as `make VERB LANE=...` does.

The verbs are ``check``, ``test``, ``gate`` and, for every test, ``all``. A lane is a process with an own log,
because most of what tests do with packets is waiting. Progress is printed as lanes start, move on and end.
Rights that are missing on this machine follow, each with the number of tests that it costs. The last line is
``N passed, N failed``, with ``, N skipped`` if it is not 0. The exit status is 1 if anything failed; in CI
(`tests.rights.CI`) a test that did not run has failed.
"""

import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kproxy_conformance.network.patience import PATIENCE, patience
from kproxy_conformance.processes import own_name
from tests.rights import CI

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
SILENT = 700.0
"""Seconds without a word of a lane, after which it is ended: pytest says after 600 where a test hangs."""
TO_CLEAN_UP = 60.0
"""Seconds between its interruption and its end by force."""

_CODE = ("kproxy_core", "plugins", "bpf", "conformance", "tests", "examples")
_CHECKED = (*_CODE, *(f"deploy/{path.name}" for path in (CHECKOUT / "deploy").glob("*.py")))
_NOT_IN_A_GUEST = ("-m", "not in_a_guest")
_MODES = ("iptables", "userspace", "iptables-legacy", "nftables-through-api", "nftables", "ebpf")
_TOURS = "tests/switch/test_switch.py"
_INSTALLED = "tests/kit/test_an_installed_example.py"
_NEIGHBOURS = (
    "tests/core/app/test_beside_other_programs.py", "tests/core/linux/test_foreign_tables.py",
    "tests/plugins/nftables/test_beside_kube_proxy.py", "tests/plugins/iptables/test_beside_kube_proxy.py",
    "tests/plugins/test_nft_equality.py", "tests/plugins/test_odd_messages.py",
    "tests/core/nft/test_interpret_at_length.py",
)
"""Other programs on the node, other releases of nft, and what kernels may send."""
_REPORT = "tests/core/cli/test_report_command.py"
_CORE = (("tests/core/cli",), ("tests/core/kube",), ("tests/core/app", "tests/core/modes"))
_PLUGINS = (("tests/plugins/nftables", "tests/plugins/ebpf"),)
"""Rooms of `tests/core` and `tests/plugins` whose tests take a lane; the others share one."""
_IDLE = "tests/plugins/userspace/test_idle.py"


@dataclass(frozen=True, slots=True)
class Lane:
    """Some of the tests."""

    name: str
    arguments: tuple[str, ...]
    """For pytest; another program with its arguments if *is_program*."""
    is_program: bool = False
    in_a_guest: bool = False
    repeats: bool = False
    """Its tests are in other lanes, too: it plays them with other options."""

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


def _scenarios(mode: str, *families: str, parts: int = 1) -> list[Lane]:
    """Return the lanes for the scenarios of *mode* in *families*, which are divided into *parts*."""
    selected = ("tests/conformance", "-k", _of_a_mode(mode, families=families))
    return [Lane(mode, (*selected, f"--part={part}/{parts}")) for part in range(1, parts + 1)]


def _of_a_mode(*modes: str, families: Sequence[str] = ("ipv4", "ipv6")) -> str:
    """Return the expression for pytest that selects the tests of *modes* by their ids."""
    return " or ".join(f"{mode}-{family}" for mode in modes for family in families)


def _by_room(name: str, directory: str, rooms: Sequence[Sequence[str]], *arguments: str) -> list[Lane]:
    """Return a lane for each of *rooms* and one for the rest of *directory*.

    A lane imports all modules that it chooses tests from: with `--part`, each part imports those of all.
    """
    rest = (directory, *_without(*(room for each in rooms for room in each)))
    return [Lane(name, (*selected, *arguments)) for selected in (*rooms, rest)]


def _without(*modules: str) -> list[str]:
    return [f"--ignore={module}" for module in modules]


LINT = (
    Lane("lint", (_program("ruff"), "check", *_CHECKED), is_program=True),
    Lane("types", (_program("mypy"), *_CHECKED), is_program=True),
)
TEST = (
    *_by_room("core", "tests/core", _CORE, *_without(*_NEIGHBOURS, _REPORT)),
    *_by_room("plugins", "tests/plugins", _PLUGINS, *_without(*_NEIGHBOURS, _IDLE), *_NOT_IN_A_GUEST),
    *LINT,
    Lane("switch", ("tests/switch", f"--ignore={_TOURS}", *_NOT_IN_A_GUEST)),
    Lane("kit", ("tests/kit", f"--ignore={_INSTALLED}", *_NOT_IN_A_GUEST)),
    *_scenarios("nftables", "ipv4", "ipv6", parts=2),
    *_scenarios("iptables", "ipv4"),
    *_scenarios("userspace", "ipv4"),
    *_scenarios("ebpf", "ipv4"),
    Lane("leftovers", ("tests/leftovers", *_NOT_IN_A_GUEST)),
    Lane("rest", ("tests/rooms", "tests/examples", "tests/guest", "tests/nft_releases", "tests/conformance",
                  "tests/faults", *_NOT_IN_A_GUEST,
                  "-k", f"not ({_of_a_mode(*_MODES)})")),
    Lane("shortage", ("tests/shortage", *_NOT_IN_A_GUEST)),
)  # fmt: skip
"""What a change may break; those that take longest come first."""
GATE = (
    Lane("ipvs", ("tests/plugins/ipvs", "tests/kit", "-m", "in_a_guest"), in_a_guest=True),
    Lane("guest", ("tests/switch", "tests/leftovers", "tests/guest", "tests/shortage", "tests/deploy",
                   "tests/harm", "tests/plugins/nftables", "-m", "in_a_guest"),
         in_a_guest=True),
    Lane("ebpf-in-guest", ("tests/plugins/ebpf", "-m", "in_a_guest"), in_a_guest=True),
    Lane("install", ("tests/install",)),
    Lane("soak", ("tests/soak", _IDLE)),
    Lane("harm", ("tests/harm", *_NOT_IN_A_GUEST)),
    Lane("deploy", ("tests/deploy", _REPORT, *_NOT_IN_A_GUEST)),
    Lane("neighbours", _NEIGHBOURS),
    Lane("fleet", ("tests/fleet",)),
    Lane("switch", (_TOURS, *_NOT_IN_A_GUEST)),
    Lane("environments", ("tests/environments",)),
    Lane("kit", (_INSTALLED, *_NOT_IN_A_GUEST)),
    Lane("examples", ("tests/core", "tests/plugins", "-m", "hypothesis", "--hypothesis-profile=all"),
         repeats=True),
    *_scenarios("iptables-legacy", "ipv4", "ipv6"),
    *_scenarios("nftables-through-api", "ipv4", "ipv6"),
    *_scenarios("iptables", "ipv6"),
    *_scenarios("userspace", "ipv6"),
    *_scenarios("ebpf", "ipv6"),
    Lane("browser", ("tests/browser",)),
)  # fmt: skip
"""What a change rarely breaks, or only a guest's kernel can play: what is missing for every test to run."""
CHECK = (
    *LINT,
    *(Lane("nftables", ("tests/conformance", "-k", "test_scenario and nftables-ipv4", f"--part={part}/3"))
      for part in (1, 2, 3)),
    Lane("rooms", ("tests/rooms", "--deselect=tests/rooms/test_lanes.py::test_every_test_is_in_one_lane")),
    Lane("pure", ("tests/core", "tests/plugins", "-m", "pure")),
)  # fmt: skip
"""Lanes to run before every commit."""


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
    interrupted: float | None = None
    """Time of its interruption, monotonic seconds; None: it was not."""

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

    def end_if_silent(self) -> None:
        """Interrupt it after `SILENT`, so that its tests clean up; kill it if it does not end."""
        if self.process is None or time.time() - self.log.stat().st_mtime < SILENT:
            return
        if self.interrupted is None:
            print(f"{self.lane.name} has said nothing for {SILENT:.0f} s and is ended", flush=True)
            self.interrupted = time.monotonic()
            self.process.send_signal(signal.SIGINT)
        elif time.monotonic() - self.interrupted > TO_CLEAN_UP:
            self.process.kill()

    def position(self) -> str:
        """Return how far it is: the number of tests that have ended."""
        rows = [re.sub(r" *\[ *\d+%\]$", "", line) for line in self._lines()]
        return f"{self.lane.name} at {sum(len(row) for row in rows if re.fullmatch('[.FEs]+', row))}"

    def missing_rights(self) -> Counter[str]:
        """Return how many tests were left out for each missing right."""
        found: Counter[str] = Counter()
        for line in self._lines():
            if match := re.match(r"SKIPPED \[(\d+)\] .*?: needs (.*)", line):
                found[match[2]] += int(match[1])
        return found

    def report(self) -> None:
        passed, failed, skipped = (self.tally[each] for each in ("passed", "failed", "skipped"))
        times = f"{self.seconds:6.0f} s {self.cpu:6.0f} s of CPU"
        left_out = f" {skipped:3} skipped" if skipped else ""
        print(f"{self.lane.name:22}{passed:5} passed {failed:3} failed{left_out} {times}", flush=True)
        if failed:
            print("\n".join(self._lines()), flush=True)

    def repeat_failures(self) -> None:
        if self.tally["failed"]:
            print(f"{self.lane.name} failed:", *self._lines()[-REPEATED:], sep="\n", flush=True)


def tally_of(summary: str, *, every: bool = CI) -> Counter[str]:
    """Return how many tests passed, failed and were skipped by pytest's last line.

    *every*: one that did not run has failed.
    """
    tally: Counter[str] = Counter()
    for number, what in re.findall(r"(\d+) (passed|failed|error|skipped|xfailed|xpassed)", summary):
        kind = what if what == "passed" or (what == "skipped" and not every) else "failed"
        tally[kind] += int(number)
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
            for each in under_way:
                each.end_if_silent()
            if time.monotonic() - reported > REPORTED and under_way:
                reported = time.monotonic()
                print("  ... " + ", ".join(each.position() for each in under_way), flush=True)
    finally:
        for each in under_way:
            if each.process is not None:
                each.process.terminate()
                each.process.wait()
    rights = sum((each.missing_rights() for each in ended), Counter[str]())
    for right, number in rights.most_common():
        print(f"{number} tests left out: {right}")
    slowest = max(ended, key=lambda each: each.seconds)
    cpu = sum(each.cpu for each in ended)
    took = time.monotonic() - began
    print(f"slowest: {slowest.lane.name}, {slowest.seconds:.0f} s; in all {took:.0f} s, {cpu:.0f} s of CPU")
    for each in ended:
        each.repeat_failures()
    return sum((each.tally for each in ended), Counter())


def logged(lanes: Sequence[Lane]) -> Counter[str]:
    """As `run`, with the logs in a directory that is announced and kept if anything failed.

    An interrupted run leaves it to the next sweep.
    """
    directory = Path(tempfile.mkdtemp(prefix=f"{own_name('lanes')}-"))
    tally = run(lanes, directory)
    if tally["failed"]:
        print("logs:", directory.rename(tempfile.mkdtemp(prefix="kproxy-lanes-")))
    else:
        shutil.rmtree(directory)
    return tally


def guest_is_available() -> bool:
    """Return whether the guest's modules exist or can be built; say what follows if not."""
    done = subprocess.run([MODULES], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr.strip())
        print("lanes in a guest are left out: without a guest kernel, the mode ipvs, the mode ebpf on an")
        print("older kernel and the loading of kernel modules are not tested")
    return done.returncode == 0


VERBS: Mapping[str, tuple[Lane, ...]] = {"check": CHECK, "test": TEST, "gate": GATE, "all": (*TEST, *GATE)}


def main() -> int:
    verb, *names = sys.argv[1:]
    lanes = [lane for lane in VERBS[verb] if not names or lane.name in names]
    if not lanes:
        elsewhere = [each for each, others in VERBS.items() if names[0] in {lane.name for lane in others}]
        known = dict.fromkeys(lane.name for lane in VERBS[verb])
        hint = f"make {elsewhere[0]} LANE={names[0]}" if elsewhere else f"known are {', '.join(known)}"
        sys.exit(f"make {verb} has no such lane: {hint}")
    unplayed = 0
    if any(lane.in_a_guest for lane in lanes) and not guest_is_available():
        unplayed = sum(lane.in_a_guest for lane in lanes)
        lanes = [lane for lane in lanes if not lane.in_a_guest]
    tally = logged(lanes) if lanes else Counter[str]()
    tally["failed" if CI or not lanes else "skipped"] += unplayed
    skipped = f", {tally['skipped']} skipped" if tally["skipped"] else ""
    print(f"{tally['passed']} passed, {tally['failed']} failed{skipped}")
    return 1 if tally["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

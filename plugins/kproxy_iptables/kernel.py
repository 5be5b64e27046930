"""The kernel's tables through iptables-save and iptables-restore, and what the rules depend on."""

import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kproxy_core.backend.errors import SyncFailed, Unsupported
from kproxy_core.host import sysctl
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family
from kproxy_iptables import names, saved
from kproxy_iptables.accounting import ensure_counters
from kproxy_iptables.applied import Observed, holds
from kproxy_iptables.skeleton import JUMPS, Facts
from kproxy_iptables.variant import OLDEST, Variant, Version, prefers_nft

log = logging.getLogger("kproxy.iptables")

PROGRAM = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
LOCK_PATIENCE = 5
"""Seconds that a program waits for the xtables lock."""
CHAINS_PER_CALL = 750
"""How many chains iptables-nft-restore takes best at once; README.md says what was measured."""
LONGEST_RUN = 300
"""Seconds after which a program that hangs is ended."""

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_VERSION = re.compile(r"v(\d+(?:\.\d+)+)(.*)")
_FAILED_LINE = re.compile(r"line:? (\d+)")
_RESOURCE_PROBLEM = 4
_NOT_ALLOWED = "Permission denied"


class Busy(SyncFailed):
    """Another program held the xtables lock all the time; nothing was changed."""


class Refused(SyncFailed):
    """iptables-restore failed; each table is either as it was or as it should be."""

    def __init__(self, problem: str, line: str = "") -> None:
        """*problem* in the program's words; *line* of its input is the one to blame, as far as it said so."""
        super().__init__(f"{problem}: {line}" if line else problem)
        self.line = line


class Processes:
    """Runs programs, and knows which changes in the kernel were theirs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: dict[int, None] = {}

    def is_own(self, pid: int) -> bool:
        """Whether *pid* is or was one of ours."""
        with self._lock:
            return pid in self._own

    def run(self, *argv: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a program to its end. Raises SyncFailed if it can't be started or hangs."""
        with self._started(argv) as process:
            try:
                out, err = process.communicate(stdin, timeout=LONGEST_RUN)
            except subprocess.TimeoutExpired as error:
                raise SyncFailed(f"{argv[0]} has not ended after {LONGEST_RUN} s") from error
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def lines(self, *argv: str) -> Iterator[str]:
        """What a program prints, line by line. Raises SyncFailed if it fails."""
        with self._started(argv) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdin.close()
            yield from process.stdout
            problem = process.stderr.read()
            if process.wait(LONGEST_RUN):
                raise SyncFailed(f"{argv[0]}: exit {process.returncode}: {problem.strip()}")

    @contextmanager
    def _started(self, argv: tuple[str, ...]) -> Iterator["subprocess.Popen[str]"]:
        pipe = subprocess.PIPE
        with self._lock:  # Who asks `is_own` waits until the pid is known.
            try:
                process = subprocess.Popen(
                    [find_program(argv[0]) or argv[0], *argv[1:]],
                    stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace",
                )  # fmt: skip
            except OSError as error:
                raise SyncFailed(f"{argv[0]} can't be started: {error.strerror}") from error
            self._own.pop(process.pid, None)
            self._own[process.pid] = None
            if len(self._own) > 100:  # Notifications come late, but not by so many.
                del self._own[next(iter(self._own))]
        with process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()


class Tables:
    """The tables of one family."""

    def __init__(self, family: Family, variant: Variant, processes: Processes) -> None:
        self.family = family
        self.variant = variant
        self._processes = processes
        self._program = variant.program(PROGRAM[family])
        self._save = variant.program(PROGRAM[family], "save")
        self._restore = variant.program(PROGRAM[family], "restore")
        # The legacy interface replaces a whole table in each call: the fewer, the better.
        self.chains_per_call = CHAINS_PER_CALL if variant.nft else 1_000_000_000
        """How many chains are best given to `restore` at once."""

    def observe(self) -> Observed:
        """Read what is there. Raises SyncFailed."""
        return saved.read(self._processes.lines(self._save))

    def restore(self, text: str) -> None:
        """Give *text* to iptables-restore; each of its tables changes as a whole or not at all.

        Raises Busy or Refused.
        """
        done = self._processes.run(
            self._restore, "-w", str(LOCK_PATIENCE), "--noflush", "--counters", stdin=text
        )
        if done.returncode == 0:
            return
        problem = " ".join(done.stderr.split())
        if done.returncode == _RESOURCE_PROBLEM and not self.variant.nft:
            raise Busy(f"{self._restore}: {problem}")
        raise Refused(f"{self._restore}: exit {done.returncode}: {problem}", _blamed(text, problem))

    def has_canary(self, table: str) -> bool:
        """Whether the canary chain is in *table*. Raises SyncFailed if that can't be told."""
        done = self._list(table, names.CANARY)
        if done.returncode == _RESOURCE_PROBLEM:
            raise Busy(f"{self._program}: {' '.join(done.stderr.split())}")
        return done.returncode == 0

    def has_jumps(self, table: str, chain: str) -> bool:
        """Whether all our jumps are in a built-in chain. Raises SyncFailed if that can't be told."""
        done = self._list(table, chain)
        if done.returncode:
            raise SyncFailed(f"{self._program}: {' '.join(done.stderr.split())}")
        held = [line.removeprefix(f"-A {chain} ") for line in done.stdout.splitlines()]
        return all(holds(held, jump.spec) for jump in JUMPS if (jump.table, jump.chain) == (table, chain))

    def missing(self) -> bool:
        """Whether this kernel lacks the interface or the family; then there can be no rules either."""
        problem = self.problem()
        return bool(problem) and _NOT_ALLOWED not in problem

    def problem(self) -> str:
        """Why the nat table of this family can't be used; "" if it can."""
        try:
            done = self._list(names.NAT, "POSTROUTING")
        except SyncFailed as error:
            return str(error)
        return (" ".join(done.stderr.split()) or "no nat table") if done.returncode else ""

    def _list(self, table: str, chain: str) -> "subprocess.CompletedProcess[str]":
        return self._processes.run(self._program, "-w", str(LOCK_PATIENCE), "-t", table, "-S", chain)


def _blamed(text: str, problem: str) -> str:
    """The rule that was refused. The legacy program only says which table, by the line of its COMMIT."""
    found = _FAILED_LINE.search(problem)
    lines = text.splitlines()
    number = int(found[1]) - 1 if found else -1
    return lines[number] if 0 <= number < len(lines) and lines[number].startswith("-") else ""


def find_program(name: str) -> str | None:
    """The path of a program, also where PATH leaves out what only root needs."""
    return shutil.which(name, path=_PATH)


def find_variants(processes: Processes) -> list[Variant]:
    """Every iptables that is installed, each once."""
    found = [_probe(processes, infix) for infix in ("-nft", "-legacy", "")]
    kinds: dict[bool, Variant] = {}
    for variant in found:
        if variant is not None:
            kinds.setdefault(variant.nft, variant)
    return list(kinds.values())


def find_variant(processes: Processes) -> Variant:
    """The iptables that this node uses.

    Raises Unsupported if there is none, or only one that is too old.
    """
    found = {variant.nft: variant for variant in find_variants(processes)}
    if not found:
        raise Unsupported("iptables is not installed")
    if len(found) == 2:

        def save(kind: str, table: str) -> Iterable[str]:
            arguments = ("-t", table) if table else ()
            for base in PROGRAM.values():
                try:
                    yield from processes.lines(found[kind == "nft"].program(base, "save"), *arguments)
                except SyncFailed:  # This kernel lacks the family or the interface.
                    continue

        default = _probe(processes, "")
        chosen = found[prefers_nft(save, default is None or default.nft)]
    else:
        (chosen,) = found.values()
    if chosen.version < OLDEST:
        raise Unsupported(f"{chosen} is too old: {'.'.join(map(str, OLDEST))} is needed")
    return chosen


def _probe(processes: Processes, infix: str) -> Variant | None:
    """The variant whose programs have *infix* in their names, if they are installed."""
    program = f"iptables{infix}"
    if not all(find_program(name) for name in (program, f"{program}-save", f"{program}-restore")):
        return None
    try:
        said = processes.run(program, "--version").stdout
    except SyncFailed:
        return None
    found = _VERSION.search(said)
    if found is None:
        return None
    version: Version = tuple(map(int, found[1].split(".")))
    return Variant("nf_tables" in found[2], infix, version)


def read_facts() -> Facts:
    """What this kernel can do, as far as rules depend on it. Makes the accounting objects."""
    try:
        liberal = sysctl.read("net/netfilter/nf_conntrack_tcp_be_liberal") != "0"
    except HostError:
        liberal = False
    return Facts(liberal=liberal, counters=ensure_counters())


def enable_route_localnet() -> None:
    """Let packets to 127.0.0.0/8 be routed, which node ports on localhost need. Raises SyncFailed."""
    try:
        if sysctl.ensure("net/ipv4/conf/all/route_localnet", 1):
            log.info("node ports are served on localhost: route_localnet is now 1")
    except HostError as error:
        raise SyncFailed(f"{error}; iptables.localhostNodePorts needs it") from error

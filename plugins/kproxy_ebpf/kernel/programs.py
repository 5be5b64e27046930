"""The compiled programs: built with the wheel, else from the cache, else from a process that runs bcc.

Only this process needs bcc and a compiler.
"""

import errno
import hashlib
import math
import os
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

import kproxy_bpf
from kproxy_core.contract import HostError
from kproxy_core.linux import packages, programs
from kproxy_ebpf import names
from kproxy_ebpf.kernel.bpf import MapDefinition, load_program

CACHE = "/run/kproxy"
_TIMEOUT = 60.0
"""Timeout in seconds for one compilation, which takes 0.5 s on a node and 17 s on an emulated kernel."""


_REFUSALS = (errno.EACCES, errno.EINVAL, errno.E2BIG, errno.EOPNOTSUPP, 524)
"""Errors of the verifier; 524 is the kernel's own ENOTSUPP (linux/errno.h)."""


class ProgramRefused(OSError):
    """The kernel's verifier refuses a program, or the kernel does not know what it uses."""


class StillCompiling(HostError):
    """The compiler has not finished; its result can be waited for again."""


class Program(NamedTuple):
    code: bytes
    references: tuple[tuple[int, str], ...]
    """Offsets in the code, with the map whose descriptor belongs there."""


class Compiled(NamedTuple):
    """All programs, and the maps that they share."""

    maps: dict[str, MapDefinition]
    programs: dict[str, Program]

    @property
    def layout(self) -> str:
        """Name of this set of maps without their sizes: programs with the same layout share maps."""
        kinds = sorted((name, made._replace(entries=0)) for name, made in self.maps.items())
        return hashlib.sha256(repr(kinds).encode()).hexdigest()[:16]

    def load(self, name: str, maps: dict[str, int]) -> int:
        """Load one program with *maps* by name, and return its descriptor. Raises ProgramRefused, OSError."""
        program = self.programs[name]
        code = bytearray(program.code)
        for at, wanted in program.references:
            struct.pack_into("=i", code, at + 4, maps[wanted])
        try:
            return load_program(*names.KINDS[name], names.OBJECT_PREFIX + name, bytes(code))
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            raise ProgramRefused(error.errno, f"the kernel refuses {name}: {error.strerror}") from error


class Compilation:
    """The programs being compiled, or found at once."""

    def __init__(
        self, cache: str = CACHE, *, start: bool = True, script: Path = kproxy_bpf.COMPILER,
        timeout: float = _TIMEOUT, shipped: Path | None = kproxy_bpf.DIRECTORY,
    ) -> None:
        """Start the compiler, *script*, unless *shipped* or *cache* has the result, or only look.

        *shipped*: the directory with the programs that were built with the wheel; None: the kernel refuses
        them. The compiler is ended after *timeout* seconds. Raises HostError if it cannot be started, or bcc
        is missing.
        """
        self._timeout = timeout
        maps, programs = names.MAPS, tuple(names.KINDS)
        name = kproxy_bpf.file_name(programs, maps, script)
        self._cached = Path(cache) / name
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = math.inf
        """Time at which the compiler is killed (monotonic seconds), counted from the first `result`."""
        self._compiled = _read(shipped / name) if shipped is not None else None
        self.are_shipped = self._compiled is not None
        """The programs are those of the wheel."""
        if self._compiled is None:
            self._compiled = self._read_cache()
        if start and self._compiled is None:
            if (python := compiler()) is None:
                raise HostError(f"the BPF programs cannot be compiled: bcc is not installed; {bcc_remedy()}")
            try:
                self._process = subprocess.Popen(
                    [python, *kproxy_bpf.arguments(programs, maps, script)],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
            except OSError as error:
                raise HostError(f"the BPF compiler could not be started: {error}") from error

    @property
    def is_done(self) -> bool:
        """Whether no compiler is needed."""
        return self._compiled is not None

    def result(self, patience: float = math.inf) -> Compiled:
        """Wait for the compiler if necessary, up to *patience* seconds.

        Raises StillCompiling after that, and HostError with the end of its error output.
        """
        if self._compiled is not None:
            return self._compiled
        process = self._process
        if process is None:
            raise HostError("an earlier attempt to compile the BPF programs failed")
        now = time.monotonic()
        self._deadline = min(self._deadline, now + self._timeout)
        try:
            out, said = process.communicate(timeout=min(patience, max(0.0, self._deadline - now)))
        except subprocess.TimeoutExpired:
            if time.monotonic() < self._deadline:
                raise StillCompiling("the BPF programs are being compiled") from None
            self.close()
            raise HostError(f"the BPF compiler did not finish in {self._timeout:g} s") from None
        self._process = None
        if process.returncode:
            told = said.decode(errors="replace").strip().rpartition("\n")[2][-300:]
            raise HostError(f"the BPF programs could not be compiled: {told or process.returncode}")
        try:
            self._compiled = msgspec.json.decode(out, type=Compiled)
        except msgspec.MsgspecError as error:
            raise HostError(f"the BPF compiler printed something else than programs: {error}") from error
        with suppress(OSError):  # Compiling again is the only loss.
            self._write(out)
        return self._compiled

    def close(self) -> None:
        """End a compiler that still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _read_cache(self) -> Compiled | None:
        with suppress(OSError):
            if self._cached.stat().st_uid == os.geteuid():
                return _read(self._cached)
        return None

    def _write(self, out: bytes) -> None:
        self._cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = self._cached.with_suffix(f".{os.getpid()}")
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(out)
        scratch.rename(self._cached)


def _read(path: Path) -> Compiled | None:
    """Return the programs in a file that the compiler wrote; None: it is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Compiled)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def compiler() -> str | None:
    """Return the Python that has bcc: this one, or the distribution's. None: bcc is not installed.

    Raises HostError.
    """
    look = "from importlib.util import find_spec; raise SystemExit(find_spec('bcc') is None)"
    return next(
        (python for python in packages.interpreters("bcc")
         if python == sys.executable or not programs.run(python, "-I", "-c", look).returncode),
        None)


def bcc_remedy() -> str:
    return packages.remedy("python3-bpfcc", "python3-bcc")

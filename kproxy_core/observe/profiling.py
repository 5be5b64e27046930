"""CPU profiles of this process in the format of ``go tool pprof`` (google/pprof's profile.proto)."""

import gzip
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import NamedTuple

_PERIOD = 0.01
"""Seconds between two samples."""

_DEEPEST = 100


class Place(NamedTuple):
    """One level of a call stack."""

    function: str
    file: str
    line: int


class Stack(NamedTuple):
    thread: str
    places: tuple[Place, ...]
    """The innermost first."""


class Profile(NamedTuple):
    began_ns: int
    """Wall clock."""
    lasted_ns: int
    counts: Counter[Stack]
    """Number of samples in which the stack had run."""
    cpu_ns: Counter[Stack]
    """CPU time charged to the stack."""


def sample(seconds: float, abandoned: threading.Event) -> Profile:
    """Sample all other threads 100 times a second for *seconds*, or until it is *abandoned*.

    A stack is charged the CPU time of its thread since the sample before. Waiting threads are not counted.
    """
    began, end = time.time_ns(), time.monotonic() + seconds
    started = time.monotonic_ns()
    counts: Counter[Stack] = Counter()
    cpu: Counter[Stack] = Counter()
    used: dict[int, int] = {}
    own = threading.get_ident()
    while time.monotonic() < end and not abandoned.is_set():
        frames = sys._current_frames()
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if frame is None or thread.ident == own or thread.native_id is None:
                continue
            now = _cpu_ns(thread.native_id)
            before = used.get(thread.native_id, now)
            used[thread.native_id] = now
            if now > before:
                stack = Stack(thread.name, tuple(_places(frame)))
                counts[stack] += 1
                cpu[stack] += now - before
        del frames
        time.sleep(_PERIOD)
    return Profile(began, time.monotonic_ns() - started, counts, cpu)


def encode(profile: Profile) -> bytes:
    """Return *profile* as a gzipped message ``perftools.profiles.Profile``."""
    strings: dict[str, int] = {"": 0}
    functions: dict[tuple[str, str], int] = {}
    locations: dict[Place, int] = {}

    def text(of: str) -> int:
        return strings.setdefault(of, len(strings))

    def value_type(kind: str, unit: str) -> bytes:
        return _number(1, text(kind)) + _number(2, text(unit))

    def location(place: Place) -> int:
        functions.setdefault((place.function, place.file), len(functions) + 1)
        return locations.setdefault(place, len(locations) + 1)

    body = [_bytes(1, value_type("samples", "count")), _bytes(1, value_type("cpu", "nanoseconds"))]
    for stack, count in profile.counts.items():
        label = _number(1, text("thread")) + _number(2, text(stack.thread))
        body.append(_bytes(2, b"".join((
            *(_number(1, location(place)) for place in stack.places),
            _number(2, count), _number(2, profile.cpu_ns[stack]), _bytes(3, label),
        ))))
    for place, number in locations.items():
        line = _number(1, functions[place.function, place.file]) + _number(2, place.line)
        body.append(_bytes(4, _number(1, number) + _bytes(4, line)))
    for (function, file), number in functions.items():
        named = _number(2, text(function)) + _number(3, text(function)) + _number(4, text(file))
        body.append(_bytes(5, _number(1, number) + named))
    body.append(_number(9, profile.began_ns) + _number(10, profile.lasted_ns))
    body.append(_bytes(11, value_type("cpu", "nanoseconds")) + _number(12, round(_PERIOD * 1e9)))
    body += [_bytes(6, string.encode()) for string in strings]
    return gzip.compress(b"".join(body))


def folded(profile: Profile) -> Iterator[str]:
    """Yield a line for each stack, outermost call first, with its microseconds, for flame graphs."""
    for stack, nanoseconds in profile.cpu_ns.most_common():
        places = (f"{place.function} ({place.file}:{place.line})" for place in reversed(stack.places))
        yield ";".join((stack.thread, *places)) + f" {nanoseconds // 1000}"


def _places(frame: FrameType) -> Iterator[Place]:
    for caller, line in islice(walk_stack(frame), _DEEPEST):
        yield Place(caller.f_code.co_qualname, caller.f_code.co_filename, line)


def _cpu_ns(native_id: int) -> int:
    """Return the CPU time of a thread of this process; 0 if it has ended."""
    try:
        with open(f"/proc/self/task/{native_id}/schedstat", "rb") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _varint(value: int) -> Iterable[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value


def _number(field: int, value: int) -> bytes:
    return bytes((*_varint(field << 3), *_varint(value)))


def _bytes(field: int, value: bytes) -> bytes:
    return bytes((*_varint(field << 3 | 2), *_varint(len(value)))) + value

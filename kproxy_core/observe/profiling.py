"""CPU profiles of this process in the format of ``go tool pprof`` (google/pprof's profile.proto)."""

import gzip
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import NamedTuple

_PERIOD = 0.01
"""Interval in seconds between samples."""

_DEEPEST = 100

_MESSAGES = {
    "Profile": "sample_type=1 repeated ValueType, sample=2 repeated Sample, location=4 repeated Location, "
               "function=5 repeated Function, string_table=6 repeated string, time_nanos=9 int64, "
               "duration_nanos=10 int64, period_type=11 ValueType, period=12 int64",
    "ValueType": "type=1 int64, unit=2 int64",
    "Sample": "location_id=1 repeated uint64, value=2 repeated int64, label=3 repeated Label",
    "Label": "key=1 int64, str=2 int64",
    "Location": "id=1 uint64, line=4 repeated Line",
    "Line": "function_id=1 uint64, line=2 int64",
    "Function": "id=1 uint64, name=2 int64, filename=4 int64",
}
"""The messages of profile.proto, as `message_classes` takes them."""


class Frame(NamedTuple):
    """One level of a call stack."""

    function: str
    file: str
    line: int


class Stack(NamedTuple):
    thread: str
    places: tuple[Frame, ...]
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
    from kproxy_core.kube.protobuf import message_classes  # a proxy may have no other use for protobuf

    strings: dict[str, int] = {"": 0}
    locations: dict[Frame, int] = {}

    def text(of: str) -> int:
        return strings.setdefault(of, len(strings))

    cpu = {"type": text("cpu"), "unit": text("nanoseconds")}
    message = message_classes(_MESSAGES)("Profile")(
        sample_type=[{"type": text("samples"), "unit": text("count")}, cpu],
        time_nanos=profile.began_ns, duration_nanos=profile.lasted_ns,
        period_type=cpu, period=round(_PERIOD * 1e9))

    def location(place: Frame) -> int:
        if (number := locations.get(place)) is None:
            number = locations[place] = len(locations) + 1
            message.function.add(id=number, name=text(place.function), filename=text(place.file))
            message.location.add(id=number, line=[{"function_id": number, "line": place.line}])
        return number

    for stack, count in profile.counts.items():
        message.sample.add(
            location_id=map(location, stack.places), value=[count, profile.cpu_ns[stack]],
            label=[{"key": text("thread"), "str": text(stack.thread)}])
    message.string_table.extend(strings)
    return gzip.compress(message.SerializeToString())


def folded(profile: Profile) -> Iterator[str]:
    """Yield a line for each stack, outermost call first, with its microseconds, for flame graphs."""
    for stack, nanoseconds in profile.cpu_ns.most_common():
        places = (f"{place.function} ({place.file}:{place.line})" for place in reversed(stack.places))
        yield ";".join((stack.thread, *places)) + f" {nanoseconds // 1000}"


def _places(frame: FrameType) -> Iterator[Frame]:
    for caller, line in islice(walk_stack(frame), _DEEPEST):
        yield Frame(caller.f_code.co_qualname, caller.f_code.co_filename, line)


def _cpu_ns(native_id: int) -> int:
    """Return the CPU time of a thread of this process; 0 if it has ended."""
    try:
        with open(f"/proc/self/task/{native_id}/schedstat", "rb") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0

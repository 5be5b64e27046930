"""Profiles and verbosity at kube-proxy 1.36's paths ``/debug/pprof/...`` and ``/debug/flags/...``."""

import threading
from collections.abc import Callable
from pathlib import Path

from kproxy_core.observe.http.messages import Answer, Handler, Request, Slow, Turn
from kproxy_core.observe.logs import stacks

_LONGEST_PROFILE = 300.0
_FRAMES_OF_AN_ALLOCATION = 10
_LARGEST_ALLOCATIONS = 50

_PROFILES = {
    "cmdline": "the command line of this process",
    "goroutine": "the stack of every thread",
    "heap": "memory allocated, and kept, in ?seconds=N (10), by the lines that allocated most",
    "profile": "processor time of ?seconds=N (30); ?debug=1 for folded stacks instead of pprof's format",
}

_HTML = "text/html; charset=utf-8"
_ANOTHER = Answer(409, b"another profile is being taken\n")


class Debug:
    """The handlers of the paths below ``/debug/``. Takes one profile at a time."""

    def __init__(self, set_verbosity: Callable[[int], None]) -> None:
        self._set_verbosity = set_verbosity
        self._busy = threading.Lock()
        self.handlers: dict[str, Handler] = {
            "/debug/pprof": lambda _: Answer(302, b"", headers=(("Location", "/debug/pprof/"),)),
            "/debug/pprof/": lambda _: Answer(200, _index("/debug/pprof/", _PROFILES), _HTML),
            "/debug/pprof/cmdline": lambda _: Answer(200, Path("/proc/self/cmdline").read_bytes()[:-1]),
            "/debug/pprof/goroutine": lambda _: Answer(200, stacks().encode()),
            "/debug/pprof/heap": self._heap,
            "/debug/pprof/profile": self._profile,
            "/debug/flags": lambda _: Answer(200, _index("/debug/flags/", {"v": "PUT a number"}), _HTML),
            "/debug/flags/": lambda _: Answer(200, _index("/debug/flags/", {"v": "PUT a number"}), _HTML),
            "/debug/flags/v": self._verbosity,
        }

    def _profile(self, request: Request) -> Answer | Slow:
        from kproxy_core.observe.http import profiling  # loaded for the first profile

        as_text = dict(request.options).get("debug", "") not in ("", "0")

        def make(seconds: float, abandoned: threading.Event) -> Answer:
            profile = profiling.sample(seconds, abandoned)
            if as_text:
                return Answer(200, "".join(f"{line}\n" for line in profiling.folded(profile)).encode())
            return Answer(
                200, profiling.encode(profile), "application/octet-stream",
                (("Content-Disposition", 'attachment; filename="profile"'),),
            )  # fmt: skip

        return self._slow(request, 30.0, make)

    def _heap(self, request: Request) -> Answer | Slow:
        return self._slow(request, 10.0, lambda seconds, abandoned: Answer(
            200, _allocations(seconds, abandoned).encode()))

    def _slow(
        self, request: Request, default: float, make: Callable[[float, threading.Event], Answer]
    ) -> Answer | Slow:
        try:
            seconds = float(dict(request.options).get("seconds") or default)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= _LONGEST_PROFILE:
            return Answer(400, f"seconds must be more than 0 and at most {_LONGEST_PROFILE:g}\n".encode())
        if self._busy.locked():
            return _ANOTHER

        def make_alone(abandoned: threading.Event) -> Answer:
            if not self._busy.acquire(blocking=False):
                return _ANOTHER
            try:
                return make(seconds, abandoned)
            finally:
                self._busy.release()

        return Slow(make_alone, seconds, Turn.AT_ONCE)

    def _verbosity(self, request: Request) -> Answer:
        if request.method != "PUT":
            return Answer(406, b"unsupported http method\n")
        text = request.body.decode("latin-1").strip()
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            return Answer(400, f"failed set klog.logging.verbosity {text[:40]!a}: not a number\n".encode())
        self._set_verbosity(int(text))
        return Answer(200, f"successfully set klog.logging.verbosity to {text}".encode())


def _index(path: str, entries: dict[str, str]) -> bytes:
    row = '<li><a href="{0}{1}">{1}</a>: {2}</li>\n'
    rows = "".join(row.format(path, name, about) for name, about in entries.items())
    page = f"<!DOCTYPE html>\n<html><head><title>{path}</title></head><body><h1>{path}</h1>"
    return f"{page}\n<ul>\n{rows}</ul></body></html>\n".encode()


def _allocations(seconds: float, abandoned: threading.Event) -> str:
    """Return the lines that allocated most of the memory allocated within *seconds* and kept."""
    import tracemalloc

    tracemalloc.start(_FRAMES_OF_AN_ALLOCATION)
    try:
        abandoned.wait(seconds)
        statistics = tracemalloc.take_snapshot().statistics("traceback")
    finally:
        tracemalloc.stop()
    total = sum(statistic.size for statistic in statistics)
    lines = [f"{total} bytes allocated in {seconds:g} s and kept\n"]
    for statistic in statistics[:_LARGEST_ALLOCATIONS]:
        lines.append(f"\n{statistic.size} bytes in {statistic.count} blocks:")
        lines += statistic.traceback.format()
    return "\n".join(lines) + "\n"

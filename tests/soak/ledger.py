"""The book of a soak: when connections may fail, which did, and the tables of the report. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.soak.proxy import Usage
from tests.switch.room import Failure

LONGEST = 0.25
"""Seconds from the start of the program that damages until the proxy has repaired the kernel, without those
in which some task waited for a processor."""
SHARE_LONGER = 0.01
CONNECTIONS = 8
"""Most connections at rest: for each of four kinds a watch, and the one that it follows."""
OVERLOADED = 0.5
"""Share of a window in which some task waited for a processor."""


class Window(NamedTuple):
    """One event of a soak, from its begin until the proxy has dealt with it; monotonic seconds."""

    mode: str
    kind: str
    since: float
    until: float
    may_fail: bool
    """Connections may fail meanwhile."""
    what: str = ""
    is_noticed: bool = False
    """The kernel announced it to a running proxy, which repaired it."""
    pressure: float = 0.0
    """Share of the time in which some task of the machine waited for a processor."""

    @property
    def seconds(self) -> float:
        return self.until - self.since

    @property
    def calm_seconds(self) -> float:
        """Those in which no task of the machine waited for a processor."""
        return self.seconds * (1 - self.pressure)

    def holds(self, failure: Failure) -> bool:
        """Return True if the connection or question began before the end, and failed after the begin."""
        return failure.since <= self.until and failure.until >= self.since


@dataclass
class Ledger:
    """Everything that was seen."""

    windows: list[Window] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Everything that makes a soak fail, besides failures outside of windows."""
    usages: list[Usage] = field(default_factory=list)
    """Of one process in one mode at rest, after each lap through all modes."""
    totals: dict[str, object] = field(default_factory=dict)

    def outside(self, failures: Iterable[Failure]) -> list[Failure]:
        """Return the failures in no window in which connections may fail."""
        allowed = [window for window in self.windows if window.may_fail]
        return [failure for failure in failures if not any(window.holds(failure) for window in allowed)]

    def judged(self) -> list[Window]:
        """Return the damages of a running proxy, without those for which the machine had no time."""
        return [window for window in self.windows if window.is_noticed and window.pressure < OVERLOADED]

    def slow(self) -> list[Window]:
        """Return the judged windows longer than `LONGEST` if they are more than one of a hundred damages."""
        found = [window for window in self.judged() if window.calm_seconds > LONGEST]
        return found if len(found) > SHARE_LONGER * sum(window.is_noticed for window in self.windows) else []

    def repair_times(self) -> str:
        """Return p50, p99 and the longest of the judged windows in milliseconds."""
        durations = [window.seconds for window in self.judged()]
        return ", ".join(_milliseconds(durations, share) for share in (0.5, 0.99, 1.0)) if durations else ""

    def event_tables(self, failures: Sequence[Failure]) -> str:
        """Return Markdown tables, one line for each kind of event and one column for each mode.

        Damage and other events: milliseconds until the proxy has dealt with it, median and longest. Failures:
        connections that failed, and the milliseconds from the begin of the event to the last failure.
        """
        damage = {window.kind for window in self.windows if window.is_noticed}
        held = self._by_window(failures)
        failing = [window for window in self.windows if held[window]]
        return "\n\n".join((
            self._table("damage", (window for window in self.windows if window.kind in damage), _lengths),
            self._table("event", (window for window in self.windows if window.kind not in damage), _lengths),
            self._table("failures", failing, lambda windows: _failures([held[window] for window in windows],
                                                                      windows)),
        ))  # fmt: skip

    def _table(
        self, what: str, windows: Iterable[Window], cell: Callable[[Sequence[Window]], str]
    ) -> str:
        modes = list(dict.fromkeys(window.mode for window in self.windows))
        kinds: dict[str, dict[str, list[Window]]] = defaultdict(lambda: {mode: [] for mode in modes})
        for window in windows:
            kind = "switch to another mode" if window.kind.startswith("switch to ") else window.kind
            kinds[kind][window.mode].append(window)
        return table([what, *modes], [
            [kind, *(cell(found) if found else "" for found in by_mode.values())]
            for kind, by_mode in sorted(kinds.items(), key=lambda item: item[0].lower())
        ])  # fmt: skip

    def _by_window(self, failures: Iterable[Failure]) -> dict[Window, list[Failure]]:
        """Return the failures of each window: of the first that holds one and in which it may fail."""
        found: dict[Window, list[Failure]] = {window: [] for window in self.windows}
        for failure in failures:
            holding = [window for window in self.windows if window.holds(failure)]
            for window in sorted(holding, key=lambda window: not window.may_fail)[:1]:
                found[window].append(failure)
        return found

    def total_table(self) -> str:
        """Return a Markdown table of the sums."""
        return table(["", ""], [[name, str(value)] for name, value in self.totals.items()])


def leaks(usages: Sequence[Usage], *, growth: float, slack: int) -> list[str]:
    """Return what the process holds more of after the last lap than after the second.

    Memory may grow by the share *growth* and by *slack* bytes, connections up to `CONNECTIONS`. A leak of
    memory shows after both of the last two laps, while heaps and libraries hold more now and then.
    """
    first, last = usages[1], usages[-1]
    held = last._replace(rss=min(last.rss, usages[-2].rss))
    bounds: Mapping[str, int] = {
        "rss": int(first.rss * (1 + growth)) + slack,
        "descriptors": first.descriptors, "connections": CONNECTIONS, "threads": first.threads,
        "children": first.children,
    }  # fmt: skip
    found = {
        name: f"{name} grew: {[getattr(usage, name) for usage in usages]}"
        for name, bound in bounds.items()
        if getattr(held, name) > bound
    }
    if "descriptors" in found:
        more = Counter(last.files) - Counter(first.files)
        found["descriptors"] += f", the last time by {', '.join(sorted(more.elements()))}"
    return list(found.values())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _lengths(windows: Sequence[Window]) -> str:
    """Return the median and the longest, in milliseconds, and how many there are."""
    seconds = [window.seconds for window in windows]
    return f"{_milliseconds(seconds, 0.5)}, {_milliseconds(seconds, 1.0)} ({len(windows)})"


def _failures(held: Sequence[Sequence[Failure]], windows: Sequence[Window]) -> str:
    """Return how many connections failed, and the longest time to the last failure in milliseconds."""
    outages = [
        max(failure.since for failure in failures) - window.since
        for failures, window in zip(held, windows, strict=True)
    ]
    return f"{sum(map(_count, held))}, {_milliseconds(outages, 1.0)}"


def _count(failures: Sequence[Failure]) -> int:
    """Return how many connections failed: a lasting one is opened again at once, and counts once."""
    lasting = {failure.what for failure in failures if failure.what.startswith("lasting")}
    return len(lasting) + sum(not failure.what.startswith("lasting") for failure in failures)


def _milliseconds(values: Sequence[float], share: float) -> str:
    ordered = sorted(values)
    return f"{1000 * max(0.0, ordered[min(len(ordered) - 1, int(share * len(ordered)))]):.0f}"

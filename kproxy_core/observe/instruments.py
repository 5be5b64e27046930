"""Counters, gauges and histograms: plain numbers by label values. Not locked; who owns them does that.

Their text is what Go programs write, down to the numbers: what was made for kube-proxy's reads it.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

Sample = tuple[str, dict[str, str], float]
"""Suffix of the name (``_bucket`` ...), labels, value."""

Told = tuple[str, str, str, Iterable[Sample]]
"""Name, meaning, kind and samples of one metric."""


class Instrument:
    """What all instruments have: a name, what it means, the names of its labels."""

    __slots__ = ("about", "labels", "name")
    kind = ""

    def __init__(self, name: str, about: str, labels: tuple[str, ...]) -> None:
        self.name = name
        self.about = about
        self.labels = labels

    def samples(self) -> Iterator[Sample]:
        raise NotImplementedError


class Gauge(Instrument):
    """A number that is set. Without labels it is there from the start, with 0."""

    __slots__ = ("_values",)
    kind = "gauge"

    def __init__(self, name: str, about: str, labels: tuple[str, ...] = ()) -> None:
        super().__init__(name, about, labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def set(self, value: float, *labels: str) -> None:
        self._values[labels] = value

    def clear(self) -> None:
        """Forget the values of all labels."""
        self._values = {}

    def samples(self) -> Iterator[Sample]:
        for labels, value in self._values.items():
            yield "", dict(zip(self.labels, labels, strict=True)), value


class Counter(Gauge):
    """A number that only grows; its name ends in ``_total``."""

    __slots__ = ()
    kind = "counter"

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount


class Histogram(Instrument):
    """How many values were at most each of *buckets* (ascending), and their sum.

    Without labels it is there from the start, empty.
    """

    __slots__ = ("_buckets", "_counts", "_sums")
    kind = "histogram"

    def __init__(self, name: str, about: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> None:
        super().__init__(name, about, labels)
        self._buckets = buckets
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not labels:
            self._begin(())

    def observe(self, value: float, *labels: str) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._begin(labels)
        counts[bisect_left(self._buckets, value)] += 1
        self._sums[labels] += value

    def samples(self) -> Iterator[Sample]:
        bounds = [*map(number, self._buckets), "+Inf"]
        for labels, counts in self._counts.items():
            named = dict(zip(self.labels, labels, strict=True))
            for bound, count in zip(bounds, accumulate(counts), strict=True):
                yield "_bucket", {**named, "le": bound}, count
            yield "_count", named, sum(counts)
            yield "_sum", named, self._sums[labels]

    def _begin(self, labels: tuple[str, ...]) -> list[int]:
        counts = self._counts[labels] = [0] * (len(self._buckets) + 1)
        self._sums[labels] = 0.0
        return counts


def exposition(metrics: Iterable[Told]) -> bytes:
    """All *metrics* in Prometheus' text format 0.0.4."""
    lines: list[str] = []
    for name, about, kind, samples in metrics:
        lines += (f"# HELP {name} {about.translate(_IN_HELP)}", f"# TYPE {name} {kind}")
        lines += [f"{name}{suffix}{spelled(labels)} {number(value)}" for suffix, labels, value in samples]
    return "".join(f"{line}\n" for line in lines).encode()


def spelled(labels: Mapping[str, str]) -> str:
    """*labels* with their values in braces, sorted but for a bucket's bound; "" without any."""
    if not labels:
        return ""
    order = sorted(labels, key=lambda name: (name == "le", name))
    return "{" + ",".join(f'{name}="{labels[name].translate(_IN_LABEL)}"' for name in order) + "}"


def number(value: float) -> str:
    """*value* with as few digits as tell it from all others, with an exponent from a million on."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    if abs(value) < 1_000_000:
        return repr(float(value)).removesuffix(".0")
    digits = next(digits for digits in range(17) if float(f"{value:.{digits}e}") == value)
    return f"{value:.{digits}e}"


_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_LABEL = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

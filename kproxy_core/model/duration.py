"""Durations as Go writes them."""

import re
from typing import Self


class Duration(float):
    """A duration in seconds, read and written in Go's format: ``1m30s``, ``50ms``, ``0s``."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError if *text* is not a duration, or is beyond the 292 years that Go allows."""
        match = _DURATION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a duration such as 30s or 1m30s")
        total = 0
        for whole, fraction, unit in _DURATION_PART.findall(match["parts"] or ""):
            scale = _NANOSECONDS[unit]
            total += int(whole or 0) * scale + int(fraction or 0) * scale // 10 ** len(fraction)
        return cls.of_nanoseconds(-total if match["sign"] == "-" else total)

    @classmethod
    def of_nanoseconds(cls, number: int) -> Self:
        """Raises ValueError beyond Go's limits."""
        if abs(number) >= 1 << 63:
            raise ValueError(f"{number} ns is too long for a duration")
        return cls(number / 1_000_000_000)

    def __str__(self) -> str:
        nanoseconds = abs(round(self * 1_000_000_000))
        sign = "-" if self < 0 < nanoseconds else ""
        if nanoseconds < 1_000_000_000:
            unit = next((u for u in ("ms", "µs", "ns") if nanoseconds >= _NANOSECONDS[u]), "s")
            return sign + _decimal(nanoseconds, _NANOSECONDS[unit]) + unit
        minutes, rest = divmod(nanoseconds, _NANOSECONDS["m"])
        text = _decimal(rest, _NANOSECONDS["s"]) + "s"
        if minutes:
            hours, minutes = divmod(minutes, 60)
            text = (f"{hours}h" if hours else "") + f"{minutes}m" + text
        return sign + text


class DefaultDuration(Duration):
    """A default, distinguishable from the same duration in a file or flag."""


class NumberOrDuration(Duration):
    """A duration that a file may also give as a number of nanoseconds, as kubeadm does for 0."""

    __slots__ = ()


_NANOSECONDS = {"ns": 1, "us": 1_000, "µs": 1_000, "μs": 1_000, "ms": 1_000_000, "s": 1_000_000_000,
                "m": 60_000_000_000, "h": 3_600_000_000_000}
_PART = r"(\d{1,19}(?=[.a-zµμ])|(?=\.\d))(?:\.(\d*))?(ns|us|µs|μs|ms|s|m|h)"
_DURATION_PART = re.compile(_PART, re.ASCII)
_DURATION = re.compile(rf"(?P<sign>[-+]?)(?:0|(?P<parts>(?:{_PART})+))", re.ASCII)


def _decimal(nanoseconds: int, unit: int) -> str:
    whole, rest = divmod(nanoseconds, unit)
    return f"{whole}.{rest:0{len(str(unit)) - 1}d}".rstrip("0") if rest else str(whole)


def duration_from(kind: type, value: object) -> object:
    """Return the `Duration` of *value*, and leave other types to msgspec. Raises ValueError."""
    if not issubclass(kind, Duration):
        raise NotImplementedError
    if isinstance(value, str):
        return kind.parse(value)
    if kind is NumberOrDuration and type(value) is int:
        return kind.of_nanoseconds(value)
    raise ValueError(f"Expected a duration such as 30s, got {type(value).__name__}")

"""The tables of results: medians over the rounds, ratios to the first proxy with their range, and slopes."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tests.bench.measured import Json

Column = tuple[str, Callable[[Json], Any]]

COLUMNS = (
    ("programmed s", "initial.programmed_s"), ("sync s", "initial.sync.sync_proxy_rules.mean_s"),
    ("cpu s", "initial.cpu_s"), ("peak MiB", "memory_settled.peak_mib"),
    ("+children", "memory_settled.peak_with_children_mib"), ("rss MiB", "memory_settled.rss_mib"),
    ("incr p50 ms", "incremental.latency_ms.p50"), ("p99 ms", "incremental.latency_ms.p99"),
    ("cpu ms/chg", "incremental.cpu_ms_per_change"),
    ("conn p50 us", "connect.random_us.p50"), ("p99 us", "connect.random_us.p99"),
    ("conn/s", "connect.connections_per_s.services"))


_CHURN_COLUMNS = (
    ("churn {rate} p50 ms", "lag_ms.p50"), ("p99 ms", "lag_ms.p99"), ("cpu s", "cpu_s"),
    ("syncs", "sync.sync_proxy_rules.count"),
)  # fmt: skip


def pick(result: Any, path: str) -> Any:
    """Return the value at a dotted *path*; None if there is none."""
    for key in path.split("."):
        result = result.get(key) if isinstance(result, dict) else None
    return result


def churn_columns(results: Sequence[Json]) -> Iterator[Column]:
    rates = sorted({r for res in results for r in res.get("churn", {})}, key=_rate_of)
    for rate in rates:
        for name, path in _CHURN_COLUMNS:
            yield name.format(rate=rate), partial(_of_churn, rate, path)


def _rate_of(name: str) -> tuple[float, str]:
    return float(name.partition("/")[0]), name


def _of_churn(rate: str, path: str, result: Json) -> Any:
    return pick(result.get("churn", {}).get(rate, {}), path)


def _at(path: str, result: Json) -> Any:
    return pick(result, path)


Key = tuple[str, str, str]
"""Mode, size and minSyncPeriod."""


def table(results: Sequence[Json]) -> str:
    """Return tables in Markdown: a row for each proxy and scenario with medians over the rounds, then ratios.

    The ratio of a round is that of two runs made one right after the other; the lowest and the highest follow
    the median.
    """
    columns: list[Column] = [(name, partial(_at, path)) for name, path in COLUMNS]
    columns += churn_columns(results)
    groups: dict[Key, dict[str, list[Json]]] = {}
    for result in results:
        extra = ",".join(o for o in result["gen"].split(",") if not o.startswith(("services=", "endpoints=")))
        size = f"{result['services']}x{result['endpoints']}" + (f" {extra}" if extra else "")
        key = (result["mode"], size, result["min_sync"])
        groups.setdefault(key, {}).setdefault(result["proxy"], []).append(result)
    rows = []
    for key, by_proxy in groups.items():
        for proxy, runs in by_proxy.items():
            rows.append([proxy, *key, str(len(runs)), *(_median(get, runs) for _, get in columns)])
        first, *others = by_proxy
        for other in others:
            pairs = list(zip(by_proxy[other], by_proxy[first], strict=False))
            rows.append([f"{other} / {first}", *key, "", *(_ratio(get, pairs) for _, get in columns)])
    head = ["proxy", "mode", "size", "min sync", "runs", *(name for name, _ in columns)]
    return "\n\n".join(filter(None, [_machine(), markdown([head, *rows]), _slopes(results)]))


def _machine() -> str:
    return (f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}, "
            f"Python {platform.python_version()}")


def _median(get: Callable[[Json], Any], runs: Sequence[Json]) -> str:
    numbers = [v for v in map(get, runs) if isinstance(v, (int, float))]
    return f"{statistics.median(numbers):.4g}" if numbers else "-"


def _ratio(get: Callable[[Json], Any], pairs: Sequence[tuple[Json, Json]]) -> str:
    ratios = [get(a) / get(b) for a, b in pairs
              if isinstance(get(a), (int, float)) and isinstance(get(b), (int, float)) and get(b)]
    if not ratios:
        return "-"
    spread = f" ({min(ratios):.2f}-{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.2f}x{spread}"


_SLOPES = (
    ("memory, bytes per endpoint", "memory_settled.rss_mib", 2**20),
    ("peak memory, bytes per endpoint", "memory_settled.peak_mib", 2**20),
    ("CPU until programmed, us per endpoint", "initial.cpu_s", 1e6),
)  # fmt: skip


def _slopes(results: Sequence[Json]) -> str:
    """Return a table of costs for each endpoint: the slope of a straight line through all sizes measured."""
    points: dict[tuple[str, str], list[Json]] = {}
    for result in results:
        points.setdefault((result["proxy"], result["mode"]), []).append(result)
    rows = []
    for (proxy, mode), found in points.items():
        if len({_endpoints(result) for result in found}) < 2:
            continue
        values = []
        for _, path, unit in _SLOPES:
            known = [(_endpoints(r), float(pick(r, path))) for r in found if pick(r, path) is not None]
            xs, ys = zip(*known, strict=True) if known else ((), ())
            slope = statistics.linear_regression(xs, ys).slope if len(set(xs)) > 1 else None
            values.append("-" if slope is None else f"{slope * unit:.0f}")
        rows.append([proxy, mode, *values])
    return markdown([["proxy", "mode", *(name for name, _, _ in _SLOPES)], *rows]) if rows else ""


def _endpoints(result: Json) -> int:
    return int(result["services"] * result["endpoints"])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first of *rows* is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)

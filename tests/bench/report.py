"""The table of results: medians over the rounds, and ratios to the first proxy."""

import statistics
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
    rates = sorted({r for res in results for r in res.get("churn", {})}, key=lambda r: float(r[:-2]))
    for rate in rates:
        for name, path in _CHURN_COLUMNS:
            yield name.format(rate=rate), partial(_of_churn, rate, path)


def _of_churn(rate: str, path: str, result: Json) -> Any:
    return pick(result.get("churn", {}).get(rate, {}), path)


def _at(path: str, result: Json) -> Any:
    return pick(result, path)


def table(results: Sequence[Json]) -> str:
    """Return a table in Markdown: one row for each proxy and scenario, medians over the rounds, then
    ratios."""
    columns: list[Column] = [(name, partial(_at, path)) for name, path in COLUMNS]
    columns += churn_columns(results)
    groups: dict[tuple[str, str, str], dict[str, list[Json]]] = {}
    for result in results:
        extra = ",".join(o for o in result["gen"].split(",") if not o.startswith(("services=", "endpoints=")))
        size = f"{result['services']}x{result['endpoints']}" + (f" {extra}" if extra else "")
        key = (result["mode"], size, result["min_sync"])
        groups.setdefault(key, {}).setdefault(result["proxy"], []).append(result)
    rows = []
    for key, by_proxy in groups.items():
        medians: dict[str, list[float | None]] = {}
        for proxy, runs in by_proxy.items():
            values: list[float | None] = []
            for _, get in columns:
                numbers = [v for v in map(get, runs) if isinstance(v, (int, float))]
                values.append(statistics.median(numbers) if numbers else None)
            medians[proxy] = values
            rows.append([proxy, *key, str(len(runs)),
                         *("-" if v is None else f"{v:.4g}" for v in values)])
        first, *others = medians
        rows += [
            [f"{other} / {first}", *key, "",
             *("-" if a is None or not b else f"{a / b:.2f}x"
               for a, b in zip(medians[other], medians[first], strict=True))]
            for other in others
        ]
    head = ["proxy", "mode", "size", "min sync", "runs", *(name for name, _ in columns)]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in [head, *rows]
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)

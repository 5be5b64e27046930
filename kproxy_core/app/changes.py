"""The changes from one set of plans to another, by service port. Pure.

Plans are values that JSON can hold, so that those of a running proxy can be compared.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kproxy_core.app.explain import Json
from kproxy_core.model.address import format_socket
from kproxy_core.model.service import Destination
from kproxy_core.plan.service_plan import Frontend, ServicePlan
from kproxy_core.plan.shares import Weights, shares

GAINED, LOST, CHANGED = "gained", "lost", "changed"

_SETTINGS = {
    "internal_policy": "internal traffic policy", "external_policy": "external traffic policy",
    "affinity_seconds": "seconds of session affinity", "source_ranges": "source ranges",
    "health_check_node_port": "health check node port", "weights": "weights",
    "local_weights": "weights for policy Local", "hash": "hash",
}  # fmt: skip
_SETS = {
    "frontends": "frontend", "endpoints": "endpoint", "local_endpoints": "endpoint for policy Local",
    "resting_endpoints": "endpoint without new connections",
}  # fmt: skip


def document(plan: ServicePlan) -> Json:
    """Return *plan* as JSON has it."""
    return {
        "service_port": str(plan.key), "protocol": plan.key.protocol.name, "family": plan.family.label,
        "frontends": [frontend_text(frontend) for frontend in plan.frontends()],
        "endpoints": [format_socket(*where) for where in plan.cluster],
        "local_endpoints": [format_socket(*where) for where in plan.local],
        "resting_endpoints": [format_socket(*where) for where in plan.resting],
        "weights": _weights(plan.cluster, plan.cluster_weights),
        "local_weights": _weights(plan.local, plan.local_weights),
        "hash": plan.hash_by,
        "internal_policy": "Local" if plan.internal_policy_local else "Cluster",
        "external_policy": "Local" if plan.external_policy_local else "Cluster",
        "affinity_seconds": plan.affinity_seconds,
        "source_ranges": ", ".join(map(str, plan.source_ranges)),
        "health_check_node_port": plan.health_check_node_port,
    }  # fmt: skip


def _weights(endpoints: Sequence[Destination], weights: Weights) -> str:
    """Return the weights of *endpoints* in lowest terms; "" if all are equal."""
    found = shares(endpoints, weights) if weights else {}
    return ", ".join(f"{number} for {format_socket(*where)}" for where, number in found.items())


def frontend_text(frontend: Frontend) -> str:
    address, protocol, port = frontend
    where = f"node:{port}" if address is None else format_socket(address, port)
    return f"{where}/{protocol.name.lower()}"


def changes(before: Iterable[Json], after: Iterable[Json]) -> Iterator[Json]:
    """Yield the changes from the plans *before* to those *after*, in the order of service ports."""
    old, new = _by_key(before), _by_key(after)
    for key in sorted({*old, *new}):
        was, will = old.get(key), new.get(key)
        if was is None or will is None:
            plan = will or was or {}
            kind = LOST if will is None else GAINED
            yield change(kind, plan, [f"frontends {', '.join(plan['frontends'])}"])
        elif details := [*_details(was, will)]:
            yield change(CHANGED, will, details)


def change(kind: str, plan: Json, details: Sequence[str]) -> Json:
    return {
        "change": kind, "service_port": plan["service_port"], "protocol": plan["protocol"],
        "family": plan["family"], "details": list(details),
    }  # fmt: skip


def changes_in_kernel(
    plans: Iterable[ServicePlan], frontends: Iterable[Frontend], differences: Iterable[Json],
    stale: Iterable[Json],
) -> Iterator[Json]:
    """Yield what changes from a kernel that serves *frontends* to *plans*; its own plans are unknown.

    *differences* and *stale* are what `kproxy_core.app.explain` yields.
    """
    held = set(frontends)
    texts: dict[tuple[str, str], dict[str, None]] = {}
    for difference in differences:
        protocol = difference["frontend"].rpartition("/")[2]
        texts.setdefault((difference["service_port"], protocol), {})[
            f"{difference['frontend']}: {difference['difference']}"] = None
    for plan in sorted(plans, key=lambda plan: plan.key):
        described = document(plan)
        details = texts.get((described["service_port"], described["protocol"]), {})
        if held.isdisjoint(plan.frontends()):
            yield change(GAINED, described, [f"frontends {', '.join(described['frontends'])}"])
        elif details:
            yield change(CHANGED, described, [f"now {text}" for text in details])
    for one in stale:
        protocol = one["frontend"].rpartition("/")[2]
        unknown = {"service_port": "", "protocol": protocol, "family": ""}
        yield change(LOST, unknown, [f"frontend {one['frontend']}"])


def _by_key(plans: Iterable[Json]) -> dict[tuple[str, str, str], Json]:
    return {(plan["service_port"], plan["protocol"], plan["family"]): plan for plan in plans}


def _details(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name, word in _SETS.items():
        yield from (f"{word} {text} removed" for text in before[name] if text not in after[name])
        yield from (f"{word} {text} added" for text in after[name] if text not in before[name])
    for name, words in _SETTINGS.items():
        if before[name] != after[name]:
            yield f"{words}: {before[name] or 'none'} becomes {after[name] or 'none'}"

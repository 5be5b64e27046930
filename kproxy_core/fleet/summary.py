"""The answers of many nodes, summed up: first what few nodes say, because that is a fault of theirs."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field

from kproxy_core.fleet.answers import Diff, Difference, Top, Verified

_NAMED = 3


class Shared(Struct, frozen=True):
    """A difference between kernel and plans, and the nodes that have it."""

    difference: Difference
    nodes: Sequence[str]


def shared_differences(found: Mapping[str, Diff]) -> list[Shared]:
    """Return each difference once, those of the fewest nodes first. *found*: by node."""
    nodes: dict[Difference, list[str]] = defaultdict(list)
    for node, diff in found.items():
        for difference in dict.fromkeys(diff.differences):
            nodes[difference].append(node)
    return sorted((Shared(difference, names) for difference, names in nodes.items()),
                  key=lambda shared: (len(shared.nodes), shared.difference.frontend, shared.nodes))


class Failing(Struct, frozen=True):
    """A frontend that fails from some nodes."""

    frontend: str
    service_port: str
    problems: Mapping[str, Sequence[str]]
    """By node."""


def failing_frontends(found: Mapping[str, Verified]) -> list[Failing]:
    """Return the frontends with problems, those that fail from the fewest nodes first. *found*: by node."""
    problems: dict[tuple[str, str], dict[str, Sequence[str]]] = defaultdict(dict)
    for node, verified in found.items():
        for one in verified.frontends:
            if one.problems:
                problems[one.frontend, one.service_port][node] = one.problems
    return sorted((Failing(*key, by_node) for key, by_node in problems.items()),
                  key=lambda failing: (len(failing.problems), failing.frontend))


class Total(Struct):
    """The traffic of a service port on all nodes."""

    service_port: str
    protocol: str
    endpoints: int = 0
    """The largest number on one node: with policies, nodes have different ones."""
    forwarded: int = 0
    rejected: int = 0
    failed: int = 0
    rate: float = 0.0
    bytes: int = 0
    problems: dict[str, list[str]] = field(default_factory=dict)
    """The nodes that have each problem."""


def total_traffic(found: Mapping[str, Top]) -> list[Total]:
    """Return the sums for each service port. *found*: by node."""
    totals: dict[tuple[str, str], Total] = {}
    for node, top in found.items():
        for one in top.services:
            total = totals.setdefault((one.service_port, one.protocol), Total(one.service_port, one.protocol))
            total.endpoints = max(total.endpoints, one.endpoint_count)
            total.forwarded += one.forwarded
            total.rejected += one.rejected
            total.failed += one.failed
            total.rate += one.rate
            total.bytes += one.bytes_to_endpoint + one.bytes_from_endpoint
            for problem in one.problems:
                total.problems.setdefault(problem, []).append(node)
    return sorted(totals.values(), key=lambda total: (-total.rate, total.service_port, total.protocol))


def named(nodes: Collection[str]) -> str:
    """Return the first of *nodes*, and how many others there are."""
    first = ", ".join(list(nodes)[:_NAMED])
    rest = len(nodes) - _NAMED
    return f"{first} and {rest} more" if rest > 0 else first

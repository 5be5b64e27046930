"""The frontends to which a node's own connections are tried, and the verdict about the results. Pure."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kproxy_core.app.errors import Misused, NoAnswer
from kproxy_core.app.explain import (
    Case,
    Json,
    ReadablePlans,
    Sender,
    ServiceTarget,
    decide_case,
    meant_by,
    packet_to,
    parse_target,
    why_no_packet,
)
from kproxy_core.contract.values import KernelSide, Translation
from kproxy_core.model.address import Address, Family, Protocol, format_socket, is_loopback
from kproxy_core.model.service import Destination
from kproxy_core.plan.fate import Origin, Outcome

Expectation = Mapping[str, Any]
"""A frontend with what connections should do; see `expectation`."""

OK, PROBLEM, BY_UNKNOWN = "ok", "problem", "answered, by whom is not known"
"""Verdicts about a frontend. The last: connection tracking does not know the connections, as with NOTRACK."""

ANSWERED, REFUSED, HUNG = "answered", "refused", "hung"


class Attempt(NamedTuple):
    """One connection that was tried."""

    result: str
    """`ANSWERED`, `REFUSED`, `HUNG`, or another error in words."""
    endpoint: Destination | None
    """None: not known."""
    source: Address
    """The sender's address."""


def targets(plans: Mapping[Family, ReadablePlans], service: str) -> list[Case]:
    """Return a packet of the node to each TCP frontend; only of *service*, if that is given.

    *service* is ``[NAMESPACE/]SERVICE[:PORT[/PROTOCOL]]``. Raises NoAnswer without any frontend, and Misused.
    """
    wanted = parse_target(service) if service else None
    if wanted is not None and not isinstance(wanted, ServiceTarget):
        raise Misused(f"{service!r} is not [NAMESPACE/]SERVICE[:PORT[/PROTOCOL]]")
    found = [case for of_family in plans.values() for case in _targets(of_family, wanted)]
    if not found:
        problem = why_no_packet(plans, wanted, Sender()) if wanted else "no Service has a TCP frontend here"
        raise NoAnswer(problem)
    return found


def _targets(plans: ReadablePlans, wanted: ServiceTarget | None) -> Iterator[Case]:
    keys = plans.plans if wanted is None else meant_by(wanted, plans)
    for key in sorted(key for key in keys if key.protocol is Protocol.TCP):
        for frontend in plans.plans[key].frontends():
            packet = packet_to(frontend, Origin.NODE, plans.node)
            if packet is not None:
                yield Case.of(plans, packet, frontend, is_typical=True)


def expectation(case: Case, side: KernelSide | None) -> Json:
    """Return what connections to the frontend of *case* should do.

    *side*: where the mode decides otherwise by design, that counts. Its other differences do not. None: it
    could not be read.
    """
    packet, plan = case.question.packet, case.question.plan
    by_design = side.fate if side is not None and side.deviation else None
    fate = by_design or decide_case(case)
    return {
        "frontend": format_socket(packet.destination, packet.port),
        "service_port": str(plan.key) if plan else "",
        "outcome": fate.outcome.value, "because": fate.because,
        "endpoints": [format_socket(*choice.where) for choice in fate.choices],
        "rarest": min((choice.share for choice in fate.choices), default=0.0),
        "translated": side is not None and not side.deviation and side.translation in _BY_THE_KERNEL,
        "sticky": bool(plan and (plan.affinity_seconds or plan.hash_by == "client")),
        "ready": sum(endpoint.ready for _, endpoint in case.candidates),
    }  # fmt: skip


_BY_THE_KERNEL = (Translation.RULES, Translation.SOCKET)
"""Connection tracking knows the endpoints of such connections: no process of this node answers for them."""


def connections(expected: Expectation, most: int) -> int:
    """Return how many connections to try, *most* at most.

    They miss an endpoint in one of a thousand runs: the coupon collector's problem.
    """
    count = len(expected["endpoints"])
    if expected["outcome"] != Outcome.FORWARDED.value or expected["sticky"] or count == 1:
        return 1
    rarest: float = expected["rarest"]
    return min(most, math.ceil(round((math.log(count) + 7) / rarest, 6)))


def is_settled(expected: Expectation, attempts: Sequence[Attempt]) -> bool:
    """Return whether every endpoint has been reached, so that more connections would tell nothing."""
    return set(expected["endpoints"]) <= {_endpoint(expected, attempt) for attempt in attempts}


def result(expected: Expectation, attempts: Sequence[Attempt]) -> Json:
    """Return the results for one frontend, with its problems in words."""
    reached: dict[str, Counter[str]] = defaultdict(Counter)
    for attempt in attempts:
        reached[_endpoint(expected, attempt)][attempt.result] += 1
    problems = list(_problems(expected, reached, len(attempts))) if attempts else []
    is_known = not expected["endpoints"] or not expected["translated"] or set(reached) != {""}
    return {
        **expected, "connections": len(attempts),
        "verdict": PROBLEM if problems else OK if is_known else BY_UNKNOWN,
        "reached": [{"endpoint": endpoint, **counts} for endpoint, counts in sorted(reached.items())],
        "problems": problems,
    }  # fmt: skip


def _problems(expected: Expectation, reached: Mapping[str, Counter[str]], tried: int) -> Iterator[str]:
    answered = sum(counts[ANSWERED] for counts in reached.values())
    forwarded = expected["outcome"] == Outcome.FORWARDED.value
    if forwarded and not answered:
        results = ", ".join(sorted({result for counts in reached.values() for result in counts}))
        yield f"no connection of {tried} was answered ({results}); ready endpoints: {expected['ready']}"
    if not forwarded and answered:
        yield f"connections are answered, and should be {expected['outcome']}: {expected['because']}"
    for endpoint, counts in sorted(reached.items()):
        if endpoint and forwarded and endpoint not in expected["endpoints"]:
            yield (f"no rule translates connections: {endpoint} itself {_answers(counts)}"
                   if endpoint == expected["frontend"] else
                   f"connections reach {endpoint}, which may not be chosen")
        for how in sorted(set(counts) - {ANSWERED}) if forwarded and answered else ():
            where = f"endpoint {endpoint}" if endpoint else "endpoint not known"
            yield f"{where}: {counts[how]} of {counts.total()} connections {how}"


def _answers(counts: Mapping[str, int]) -> str:
    return "answers" if counts[ANSWERED] else "is reached"


def _endpoint(expected: Expectation, attempt: Attempt) -> str:
    """Return the endpoint of *attempt*; "" if it is not known, as behind a relay on this node."""
    if attempt.endpoint is None:
        return ""
    address, text = attempt.endpoint.address, format_socket(*attempt.endpoint)
    if text in expected["endpoints"] or expected["translated"]:
        return text
    is_relay = is_loopback(address) or address == attempt.source
    return "" if is_relay or text == expected["frontend"] else text

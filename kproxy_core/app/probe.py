"""What a probe sends for one packet that ``kproxy explain`` answers about, and the verdict. Pure."""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Final

from kproxy_core.app.verify import ANSWERED, HUNG, REFUSED, Attempt, Expectation, reached_by
from kproxy_core.contract.values import Translation
from kproxy_core.model.address import Address, format_address
from kproxy_core.plan.fate import Outcome

Json = dict[str, Any]

MOST_ENDPOINTS = 50
"""Endpoints of one frontend that are tried directly."""

PROTOCOLS = ("TCP", "UDP")

_NONE: Final[Counter[str]] = Counter()
_KNOWN_BY_FLOWS = (Translation.RULES.name, Translation.SOCKET.name)


def tries(packet: Mapping[str, Any]) -> list[Expectation]:
    """Return the targets for *packet*, an answer of ``kproxy explain``: its frontend, then its endpoints."""
    endpoints = [each["endpoint"] for each in packet["endpoints"]]
    through: Expectation = {
        "frontend": packet["to"], "protocol": packet["protocol"], "outcome": packet["planned"],
        "endpoints": endpoints, "sticky": packet["affinity"] is not None,
        "rarest": min((each["share"] for each in packet["endpoints"]), default=0.0),
        "translated": packet["kernel"]["translation"] in _KNOWN_BY_FLOWS and not _is_relayed(packet),
    }  # fmt: skip
    return [through, *(
        {"frontend": endpoint, "protocol": packet["protocol"], "outcome": Outcome.FORWARDED.value,
         "endpoints": [endpoint], "sticky": False, "rarest": 1.0, "translated": False}
        for endpoint in endpoints[:MOST_ENDPOINTS])]


def _is_relayed(packet: Mapping[str, Any]) -> bool:
    kernel = packet["kernel"]
    return kernel["translation"] == Translation.RELAY.name or any(
        item["where"] == "relay" for item in kernel["objects"])


def judged(
    packet: Mapping[str, Any], tried: Sequence[Expectation], attempts: Sequence[Sequence[Attempt]],
    own: Container[Address], *, knows_flows: bool,
) -> Json:
    """Return the results of *tried*, which `tries` returned, with their findings in words.

    *own* are this node's addresses. *knows_flows*: connection tracking was watched, so that an endpoint that
    is not known got no packet.
    """
    through, protocol, is_relayed = tried[0], packet["protocol"], _is_relayed(packet)
    reached = reached_by(through, [
        attempt._replace(endpoint=None)
        if is_relayed and attempt.endpoint is not None and attempt.endpoint.address in own else attempt
        for attempt in attempts[0]
    ])
    directly = {target["frontend"]: of[0].result for target, of in zip(tried[1:], attempts[1:], strict=True)}
    source = next((attempt.source for of in attempts for attempt in of), None)
    return {
        "source": format_address(source) if source else "",
        "tried": len(attempts[0]),
        "through": [{"endpoint": endpoint, **counts} for endpoint, counts in sorted(reached.items())],
        "relayed": is_relayed,
        "directly": [{"endpoint": endpoint, "result": result} for endpoint, result in directly.items()],
        "untried": len(through["endpoints"]) - len(directly),
        "findings": list(_findings(
            through, reached, directly, protocol, knows_flows=knows_flows, is_relayed=is_relayed)),
        "unclear": list(_unclear(through, reached, directly, protocol)),
    }  # fmt: skip


def _findings(
    through: Expectation, reached: Mapping[str, Counter[str]], directly: Mapping[str, str], protocol: str, *,
    knows_flows: bool, is_relayed: bool,
) -> Iterator[str]:
    frontend, outcome = through["frontend"], through["outcome"]
    answered = sum(counts[ANSWERED] for counts in reached.values())
    what = "connections" if protocol == "TCP" else "datagrams"
    if outcome != Outcome.FORWARDED.value:
        if answered and outcome in (Outcome.REFUSED.value, Outcome.DROPPED.value):
            yield f"{what} to {frontend} are answered, and should be {outcome}"
        return
    answers = {endpoint for endpoint, result in directly.items() if result == ANSWERED}
    for endpoint, result in directly.items():
        if result != ANSWERED and not reached.get(endpoint, _NONE)[ANSWERED]:
            yield from _of_endpoint(endpoint, result, protocol)
    for endpoint, counts in sorted(reached.items()):
        lost = counts.total() - counts[ANSWERED]
        if endpoint and endpoint not in through["endpoints"]:
            yield f"{what} to {frontend} reach {endpoint}, which is no endpoint that may be chosen for them"
        elif lost and endpoint in answers:
            how = _failed(counts)
            yield (f"{endpoint} answers directly, but {lost} of {counts.total()} {what} to it through "
                   f"{frontend} {how}: {_BACK if counts[HUNG] else _REFUSED_ON_THE_WAY}")
        elif lost and not endpoint and answers:
            why = "a relay of this node did not pass them on" if is_relayed else (
                "they opened no connection on this node: a rule drops them, or none translates them"
                if knows_flows else "the endpoints that they reached are not known")
            yield (f"endpoints answer directly, but {lost} of {counts.total()} {what} through {frontend} "
                   f"{_failed(counts)}: {why}")
        elif lost and endpoint and endpoint not in directly and protocol == "TCP":
            yield f"{endpoint}: {lost} of {counts.total()} {what} through {frontend} " + (
                _failed(counts))


_BACK = (
    "its answers do not come back through this node, as over a bridge whose packets skip netfilter or by "
    "another route, or they are dropped on the way")
_NO_LISTENER = (
    "no process of the pod listens at that port, or a filter rejects them; compare the targetPort of the "
    "Service with the container")
_REFUSED_ON_THE_WAY = "something on the way rejects them, or the endpoint does, for their source address"


def _of_endpoint(endpoint: str, result: str, protocol: str) -> Iterator[str]:
    if result == REFUSED and protocol == "TCP":
        yield f"{endpoint} refuses connections: {_NO_LISTENER}"
    elif result == REFUSED:
        yield f"{endpoint} refuses datagrams (ICMP port unreachable): {_NO_LISTENER}"
    elif result != HUNG:
        yield f"{endpoint} cannot be reached: {result}"
    elif protocol == "TCP":
        yield (f"{endpoint} does not answer: its pod or node is gone, or something on the way, such as a "
               "NetworkPolicy, drops packets to it")


def _failed(counts: Counter[str]) -> str:
    words = {HUNG: "get no answer", REFUSED: "are refused"}
    return " or ".join(words.get(result, f"fail ({result})") for result in sorted(
        result for result in counts if result != ANSWERED))


def _unclear(
    through: Expectation, reached: Mapping[str, Counter[str]], directly: Mapping[str, str], protocol: str
) -> Iterator[str]:
    """Yield what silence does not tell: a server of UDP need not answer."""
    if protocol != "UDP" or through["outcome"] != Outcome.FORWARDED.value:
        return
    silent = [endpoint for endpoint, result in directly.items()
              if result == HUNG and not reached.get(endpoint, _NONE)[ANSWERED]]
    if silent:
        shown = ", ".join(silent[:5]) + (f" and {len(silent) - 5} more" if len(silent) > 5 else "")
        yield (f"no answer from {shown} to an empty datagram, which proves nothing: UDP servers need not "
               "answer, and nothing refused it")

"""What ``kproxy explain`` says of a packet, compared with what became of it. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from kproxy_conformance.network.addresses import is_node_address, symbol_of
from kproxy_conformance.network.dialing import DROPPED, REACHED, REFUSED, UNREACHABLE, Outcome
from kproxy_conformance.suite.expectation import Attempts

Json = Mapping[str, Any]

_MAY_BE: Mapping[str, frozenset[str]] = {
    "forwarded": frozenset({REACHED}),
    # The kernel gives local UDP clients an error at once.
    "refused": frozenset({REFUSED, UNREACHABLE}),
    "dropped": frozenset({DROPPED, UNREACHABLE}),
    # The dialled host decides.
    "not touched": frozenset({REACHED, REFUSED, DROPPED, UNREACHABLE}),
    # The endpoint decides, or what is not known.
    "depends": frozenset({REACHED, REFUSED, DROPPED, UNREACHABLE}),
}


def contradictions(
    answer: Json, attempts: Attempts, *, of_all: bool, host_pods: Collection[str] = ()
) -> list[str]:
    """Return how *attempts* contradict *answer*, which is about the sender of the first.

    *answer* is for one packet, as in ``kproxy explain -o json``. *of_all*: the attempts of all senders
    reached every endpoint that they may reach. *host_pods*: pods that share the node's namespace.
    """
    kernel, sender = answer["kernel"], attempts[0][0]
    if not (kernel["outcome"] or kernel["objects"]):
        return []  # The mode does not explain itself, and so cannot say where it deviates from the plan.
    own = [outcome for source, outcome in attempts if source == sender]
    outcomes = [outcome for _, outcome in attempts] if of_all else own
    found = []
    if kernel["verdict"] not in ("agrees", "deviates by design"):
        found.append(f"the kernel {kernel['verdict']}: {'; '.join(kernel['differences'])}")
    if kernel["outcome"]:
        found += _of_side(answer, kernel, outcomes, of_all, host_pods)
    if kernel["verdict"] != "deviates by design":
        found += _of_side(answer, answer, outcomes, of_all, host_pods)
    remembered = (answer["affinity"] or {}).get("remembered")
    if remembered and own[-1].kind == REACHED and _symbol(remembered) != _end(own[-1]):
        found.append(f"the sender is pinned to {_symbol(remembered)}, and reached {_end(own[-1])}")
    return list(dict.fromkeys(found))


def _of_side(
    answer: Json, side: Json, outcomes: Sequence[Outcome], of_all: bool, host_pods: Collection[str]
) -> Iterator[str]:
    """Yield the contradictions to one *side* of an answer: the plan's or the kernel's."""
    kinds = {outcome.kind for outcome in outcomes}
    if not kinds <= _MAY_BE[side["outcome"]]:
        yield f"{side['outcome']}, and attempts are {', '.join(sorted(kinds))}"
        return
    reached = [outcome for outcome in outcomes if outcome.kind == REACHED]
    ends = {_end(outcome) for outcome in reached}
    masqueraded = {_symbol(each["endpoint"]): each["masqueraded"] for each in side["endpoints"]}
    if side["outcome"] == "not touched":
        masqueraded = {_symbol(answer["to"]): False}
    if not ends <= masqueraded.keys() or (of_all and reached and ends != masqueraded.keys()):
        yield f"{side['outcome']} to {sorted(masqueraded)}, and attempts reached {sorted(ends)}"
        return
    for outcome in reached:
        is_hidden = masqueraded[_end(outcome)]
        is_kept = outcome.seen_client == outcome.own_client
        from_node = is_node_address(outcome.seen_client, host_pods)
        is_as_said = from_node if is_hidden else is_kept or (answer["origin"] == "node" and from_node)
        if not is_as_said:
            said = "masqueraded" if is_hidden else "not masqueraded"
            yield f"{said}, and {_end(outcome)} saw {outcome.seen_client} for {outcome.own_client}"


def _symbol(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{symbol_of(host.strip('[]'))}:{port}"


def _end(outcome: Outcome) -> str:
    return f"{outcome.endpoint}:{outcome.port}"

"""The kit compares an explanation with packets, and names each way in which these contradict it."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from kproxy_conformance.network.dialing import DROPPED, REACHED, REFUSED, UNREACHABLE, Outcome
from kproxy_conformance.suite.explained import contradictions

CLIENT, NODE = "172.18.0.100", "172.18.0.2"
AGREES, DEVIATES, DIFFERS, UNKNOWN = "agrees", "deviates by design", "differs", "cannot be told"


def side(outcome: str, *endpoints: str) -> dict[str, Any]:
    """Return one side of an answer; endpoints with * are masqueraded."""
    return {"outcome": outcome, "endpoints": [
        {"endpoint": f"{each.rstrip('*')}:8080", "masqueraded": each.endswith("*")} for each in endpoints]}


def answer(
    kernel: dict[str, Any], plan: dict[str, Any] | None = None, verdict: str = AGREES, *,
    origin: str = "outside", pinned: str = "", objects: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    affinity = {"remembered": pinned} if pinned else None
    return {**(plan or kernel), "origin": origin, "to": "10.96.10.1:80", "affinity": affinity,
            "kernel": {**kernel, "verdict": verdict, "differences": ["some"],
                       "objects": objects}}  # fmt: skip


def reached(endpoint: str, seen: str = CLIENT, port: int = 8080) -> Outcome:
    return Outcome(REACHED, endpoint, port, seen, CLIENT)


POD1, POD3 = "10.244.1.11", "10.244.2.13"
BOTH = side("forwarded", POD1, f"{POD3}*")
ALL = [reached("pod1"), reached("pod3", NODE)]
CASES: dict[str, tuple[dict[str, Any], list[Outcome], str]] = {
    "as explained": (answer(BOTH), ALL, ""),
    "refused": (answer(side("refused")), [Outcome(REFUSED), Outcome(UNREACHABLE)], ""),
    "dropped": (answer(side("dropped")), [Outcome(DROPPED)], ""),
    "not touched": (answer(side("not touched")), [reached("10.96.10.1", port=80)], ""),
    "not touched, refused": (answer(side("not touched")), [Outcome(REFUSED)], ""),
    "not touched, yet elsewhere": (answer(side("not touched")), [reached("pod1")], "not touched to"),
    "another outcome": (answer(side("dropped")), [Outcome(REFUSED)], "dropped, and attempts are refused"),
    "an outcome that varies": (answer(BOTH), [*ALL, Outcome(DROPPED)], "forwarded, and attempts are dropped"),
    "another endpoint": (answer(BOTH), [*ALL, reached("pod4")], "reached .*pod4"),
    "another port": (answer(BOTH), [reached("pod1", port=9), ALL[1]], "reached .*pod1:9"),
    "an endpoint too many": (answer(BOTH), ALL[:1], "forwarded to .*pod3"),
    "source not kept": (answer(BOTH), [reached("pod1", NODE), ALL[1]], "not masqueraded, and pod1:8080 saw"),
    "source kept": (answer(BOTH), [ALL[0], reached("pod3")], "masqueraded, and pod3:8080 saw 172.18.0.100"),
    "source of a stranger": (answer(BOTH), [ALL[0], reached("pod3", "192.0.2.9")], "saw 192.0.2.9"),
    "from the node": (answer(side("forwarded", POD1), origin="node"), [reached("pod1", NODE)], ""),
    "kernel that differs": (answer(BOTH, verdict=DIFFERS), ALL, "the kernel differs: some"),
    "kernel not understood": (
        answer(side(""), BOTH, UNKNOWN, objects=["rule"]), ALL, "the kernel cannot be told"),
    "deviation": (answer(BOTH, side("dropped"), DEVIATES), ALL, ""),
    "deviation that is none": (answer(side("dropped"), BOTH, DEVIATES), ALL, "dropped, and attempts are"),
    "mode without explanation": (answer(side(""), BOTH, UNKNOWN), ALL, ""),
    "mode without explanation that deviates": (answer(side(""), side("dropped"), UNKNOWN), ALL, ""),
    "pinned": (answer(BOTH, pinned=f"{POD3}:8080"), ALL, ""),
    "pinned elsewhere": (answer(BOTH, pinned=f"{POD1}:8080"), ALL, "pinned to pod1:8080, and reached pod3"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_contradictions_are_named(name: str) -> None:
    given, outcomes, words = CASES[name]
    found = "; ".join(contradictions(given, [(None, outcome) for outcome in outcomes], of_all=True))
    assert bool(found) is bool(words)
    assert re.search(words, found), found


def test_only_attempts_of_the_sender_count_unless_all_endpoints_were_met() -> None:
    attempts = [("a", ALL[0]), ("b", reached("pod4"))]
    assert contradictions(answer(BOTH), attempts, of_all=False) == []
    assert contradictions(answer(BOTH), attempts, of_all=True)

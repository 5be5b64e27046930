"""The expected results of attempts, and the comparison with the actual ones."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

from kproxy_conformance.network.addresses import expand, is_node_address, resolve
from kproxy_conformance.network.dialing import BROKEN, DROPPED, REACHED, REFUSED, RESET, UNREACHABLE, Outcome
from kproxy_core.model.address import parse_address
from kproxy_core.model.service import Destination
from kproxy_core.plan.hashing import hash_slots, slot_of

UNIFORM_BOUND = 4.0
"""Bound on chi-square per degree of freedom. A fair balancer exceeds it about once in ten thousand probes
(which are repeated in any case), a lopsided one always."""

SHARE_BOUND = 6.5
"""Bound on the distance of a number of connections to its mean, in standard deviations: a right balancer
exceeds it once in ten billion probes."""

Attempts = Sequence[tuple[str | None, Outcome]]
"""Source addresses, and what became of the attempt from each."""
Remembered = dict[str, dict[str | None, str]]
"""By name, the endpoint that each source reached."""

_ANY_OF = {
    "unanswered": {DROPPED, REFUSED, UNREACHABLE, RESET, BROKEN},
    "broken": {RESET, BROKEN},
}


class Expectation:
    def __init__(
        self, spec: str | Mapping[str, Any], family: str, remembered: Remembered, *, all_of: bool = True,
        host_pods: Collection[str] = (), client: str = "",
    ) -> None:  # fmt: skip
        """*all_of*: each endpoint that may be reached must be. *host_pods*: pods that share the node's
        namespace. If the *client* is one, the node refuses its datagrams with EPERM, and its address is as
        good as the client's; an endpoint that is one sees clients as they are, as nothing leaves the node.
        """
        self._spec: Mapping[str, Any] = {"outcome": spec} if isinstance(spec, str) else spec
        self._family = family
        self._remembered = remembered
        self._seen: dict[str | None, str] = {}
        self._outcome: str = self._spec.get("outcome", REACHED)
        self._wanted = set(expand([str(item) for item in self._spec.get("reaches", ())]))
        self._at_least: int = self._spec.get("at_least", len(self._wanted) if all_of else 1)
        self._all_of = all_of
        self._host_pods = host_pods
        self._is_of_node = client in host_pods

    @property
    def answers(self) -> bool:
        return self._outcome == REACHED

    @property
    def is_silence(self) -> bool:
        return self._outcome == DROPPED

    @property
    def is_of_all(self) -> bool:
        """All endpoints that may be reached are named, and must be."""
        return bool(self._wanted) and self._at_least == len(self._wanted)

    @property
    def default_count(self) -> int:
        """Attempts for each source, where the step does not say."""
        if not self._all_of:
            return 1
        if not self.answers:
            return 3
        if self._spec.get("uniform"):
            return max(200, 60 * len(self._wanted))
        if "shares" in self._spec:
            return 400
        return max(12, 16 * len(self._wanted))

    def judge(self, attempts: Attempts) -> str:
        """Return the problem with *attempts*; "" if they are as expected."""
        tally = Counter(str(outcome) for _, outcome in attempts)
        seen = ", ".join(f"{number} x {text}" for text, number in tally.most_common(12))
        for problem in self._problems(attempts):
            return f"{problem}; seen: {seen}"
        return ""

    def remember(self) -> None:
        """Keep which endpoint each source reached, if the scenario asks for it."""
        if "remember" in self._spec:
            self._remembered[self._spec["remember"]] = dict(self._seen)

    def _problems(self, attempts: Attempts) -> Iterator[str]:
        outcomes = [outcome for _, outcome in attempts]
        allowed = _ANY_OF.get(self._outcome, {self._outcome})
        if self._is_of_node and self._outcome == REFUSED:
            allowed = {REFUSED, UNREACHABLE}
        if self._outcome != "anything" and any(outcome.kind not in allowed for outcome in outcomes):
            yield f"expected every attempt to be {self._outcome}"
        if self.answers:
            yield from self._endpoint_problems(outcomes)
            yield from self._share_problems(outcomes)
            yield from self._hash_problems(outcomes)
            yield from self._source_problems(outcomes)
            yield from self._affinity_problems(attempts)

    def _endpoint_problems(self, outcomes: Sequence[Outcome]) -> Iterator[str]:
        with_ports = any(":" in item for item in self._wanted)
        tally = Counter(f"{o.endpoint}:{o.port}" if with_ports else o.endpoint for o in outcomes)
        if self._wanted and not set(tally) <= self._wanted:
            yield f"reached {sorted(set(tally) - self._wanted)}, which is not expected"
        if len(tally) < self._at_least:
            yield f"reached only {len(tally)} of the {self._at_least} endpoints expected"
        if self._spec.get("uniform") and self._wanted:
            mean = len(outcomes) / len(self._wanted)
            chi2 = sum((tally[item] - mean) ** 2 / mean for item in self._wanted)
            if chi2 > UNIFORM_BOUND * max(3, len(self._wanted) - 1):
                yield f"not spread evenly: {dict(tally)}"

    def _share_problems(self, outcomes: Sequence[Outcome]) -> Iterator[str]:
        """Yield the endpoints whose number of connections cannot be chance, by their shares in percent."""
        number = len(outcomes)
        for symbol, percent in self._spec.get("shares", {}).items():
            share = percent / 100
            got = sum(symbol in (o.endpoint, f"{o.endpoint}:{o.port}") for o in outcomes)
            if abs(got - number * share) > SHARE_BOUND * sqrt(number * share * (1 - share)):
                yield f"{symbol} got {got} of {number}, expected {percent} %"

    def _hash_problems(self, outcomes: Sequence[Outcome]) -> Iterator[str]:
        """Yield the first client that reached another endpoint than every node in every mode chooses."""
        by = self._spec.get("by_hash")
        if by is None:
            return
        symbols = {
            Destination(parse_address(resolve(symbol, self._family)), int(port)): f"{symbol}:{port}"
            for symbol, _, port in (item.partition(":") for item in self._wanted)}
        slots = hash_slots(tuple(sorted(symbols)), ())
        for outcome in outcomes:
            port = outcome.own_port if by == "flow" else None
            wanted = symbols[slots[slot_of(parse_address(outcome.own_client), port, len(slots))]]
            if wanted != f"{outcome.endpoint}:{outcome.port}":
                client = f"{outcome.own_client} at port {outcome.own_port}"
                yield f"{client} reached another endpoint than {wanted}"
                return

    def _source_problems(self, outcomes: Sequence[Outcome]) -> Iterator[str]:
        source = self._spec.get("source")
        for outcome in outcomes if source is not None else ():
            from_node = is_node_address(outcome.seen_client, self._host_pods)
            if source == "preserved":
                good = outcome.seen_client == outcome.own_client or (self._is_of_node and from_node)
            elif source == "node":
                good = from_node or outcome.endpoint in self._host_pods
            else:
                good = outcome.seen_client == resolve(str(source), self._family)
            if not good:
                yield (
                    f"the endpoint saw {outcome.seen_client}, expected the source to be {source} "
                    f"(own address {outcome.own_client})"
                )
                return

    def _affinity_problems(self, attempts: Attempts) -> Iterator[str]:
        by_source: defaultdict[str | None, set[str]] = defaultdict(set)
        for source, outcome in attempts:
            by_source[source].add(outcome.endpoint)
        self._seen = {source: min(ends) for source, ends in by_source.items()}
        loose = [ends for ends in by_source.values() if len(ends) > 1]
        if self._spec.get("sticky") and loose:
            yield f"not sticky: one client reached {sorted(loose[0])}"
        if "same_as" in self._spec:
            before = self._remembered[self._spec["same_as"]]
            moved = [s for s, end in self._seen.items() if before[s] != end and before[s] in self._wanted]
            if moved:
                yield f"{len(moved)} of {len(before)} clients changed endpoint"
        if "differs_from" in self._spec and self._seen == self._remembered[self._spec["differs_from"]]:
            yield "every client still reaches the same endpoint as before"

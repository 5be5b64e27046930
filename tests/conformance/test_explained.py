"""Real packets do what `kproxy explain` predicts: Services and senders of any kind."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest

from kproxy_conformance.drivers.backend import BackendDriver
from kproxy_conformance.network.addresses import FAMILIES, SERVERS, resolve
from kproxy_conformance.network.dialing import REACHED, Outcome, wait_until
from kproxy_conformance.suite.barrier import DEADLINE
from kproxy_core.linux import sysctl
from kproxy_core.linux.tracing import Marks, Match, trace_events
from kproxy_core.model.address import Family, Protocol, format_socket, parse_address
from kproxy_ebpf.settings import Settings
from kproxy_ebpf.traffic import Traffic
from tests.conformance.any_services import Attempt, Fate, Json, World
from tests.conformance.test_any_services import Play

CASES = 300
"""Packets, at least, in rounds of up to 60."""
COUNTED = 12
"""Packets whose rules' counters are read."""

RECORDS = ("filter-postrouting ", "filter-input ", "record")
"""Chains of the nftables mode that note which endpoint was chosen, and decide nothing."""

EXACT = ("nftables", "ebpf")
"""Modes without deviations."""

CHAINS = {
    "iptables": ("nat KUBE-SVC-", "nat KUBE-SVL-", "nat KUBE-EXT-", "nat KUBE-FW-", "nat KUBE-SEP-"),
    "userspace": ("nat KUBE-PORTALS-", "nat KUBE-NODEPORT-"),
}
"""Tables, and beginnings of the names of chains in which only packets to Services meet rules."""
_COUNTED_RULE = re.compile(r"\[(\d+):\d+\] -A (\S+) (.+)")


class ExplainedPlay(Play):
    """A play that is asked before packets are sent.

    The backend is in this process, and reads the kernel once for all packets of a round. Scenarios ask a
    running proxy about theirs.
    """

    make_driver = BackendDriver

    def explained(self, attempt: Attempt) -> dict[str, Any]:
        """Return the answer for *attempt*."""
        (answer,) = self.all_explained([attempt])
        return answer

    def compared(self, attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
        """Ask about *attempts*, then send them and compare their fates. Return the answers."""
        answers = self.all_explained(attempts)
        assert self.problems(attempts, map(self.predicted, attempts, answers)) == []
        return answers

    def cases(
        self, seed: str, is_wanted: Callable[[Attempt, dict[str, Any]], bool]
    ) -> Iterator[tuple[Attempt, dict[str, Any]]]:
        """Yield the wanted packets to a changing world with their answers, in rounds, `COUNTED` at least."""
        world = World(Random(seed))
        left = COUNTED
        while left > 0:
            self.apply(world)
            attempts = list(world.attempts())
            for attempt, answer in zip(attempts, self.all_explained(attempts), strict=True):
                if is_wanted(attempt, answer):
                    yield attempt, answer
                    left -= 1

    def all_explained(self, attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
        """Return the answers for all *attempts*."""
        answers = self._stage.driver.explained(list(map(self.request, attempts)))
        assert answers is not None
        return answers

    def request(self, attempt: Attempt) -> dict[str, str]:
        """Return the request that *attempt* is explained with."""
        to = format_socket(parse_address(resolve(attempt.to, self._family)), attempt.port)
        sender = "node" if attempt.client == "node" else resolve(attempt.client, self._family)
        return {"to": f"{to}/{attempt.protocol.lower()}", "from": sender}

    def predicted(self, attempt: Attempt, answer: dict[str, Any]) -> Fate:
        """Return the fate that the kernel's side of *answer* promises."""
        hosts = {resolve(host, self._family): host for host in SERVERS}
        kernel = answer["kernel"]
        found = set()
        for endpoint in kernel["endpoints"]:
            host, _, port = endpoint["endpoint"].rpartition(":")
            found.add((hosts[host.strip("[]")], int(port)))
        others = [e for e in kernel["endpoints"] if answer["from"] not in e["endpoint"]]
        outcomes = {"forwarded": "reached", "refused": "refused"}
        return Fate(outcomes.get(kernel["outcome"], "dropped"), frozenset(found),
                    masqueraded=any(e["masqueraded"] for e in others))  # fmt: skip

    def settled(self, attempt: Attempt) -> dict[str, Any]:
        """Return the answer for *attempt* once no relay is about to listen."""
        wait_until(lambda: "not answered yet" not in str(self.explained(attempt)), DEADLINE)
        return self.explained(attempt)

    def dialled(self, attempt: Attempt) -> Outcome:
        """Return what becomes of one connection of *attempt*."""
        return self._try(attempt, 1.0)

    def show_bridged_packets(self, shown: bool) -> None:
        """Set whether iptables sees packets on ports of the node's bridges."""
        with self._stage.topology["node"].entered():
            for name in ("iptables", "ip6tables"):
                sysctl.ensure(f"net/bridge/bridge-nf-call-{name}", int(shown))

    def counted(self, attempt: Attempt, chains: tuple[str, ...]) -> set[tuple[str, str]]:
        """Return the objects that count one connection of *attempt*, after their places.

        Only those whose places begin with one of *chains*.
        """
        before = self.counters()
        self._try(attempt, 2.0)
        return {(where, text) for where, text in self.counters() - before if where.startswith(chains)}

    def counters(self) -> Counter[tuple[str, str]]:
        """Return the packets that each rule of iptables has counted."""
        program = "iptables-save" if self._family == "ipv4" else "ip6tables-save"
        found = Counter[tuple[str, str]]()
        table = ""
        for line in self._stage.topology["node"].run(program, "-c").splitlines():
            if line.startswith("*"):
                table = line[1:]
            elif rule := _COUNTED_RULE.match(line):
                found[f"{table} {rule[2]}", rule[3]] += int(rule[1])
        return found

    def traced(self, attempt: Attempt) -> set[str]:
        """Return the rules of our nftables table that one packet of *attempt* meets, by chain and handle."""
        family = Family.IPV4 if self._family == "ipv4" else Family.IPV6
        to = parse_address(resolve(attempt.to, self._family))
        match = Match(family, to, Protocol[attempt.protocol], attempt.port, None)
        with self._stage.topology["node"].entered(), trace_events() as events, Marks("traced", [match]):
            self._try(attempt, 2.0)
            seen = list(events.read())
        begin = next(event for event in seen if event.table == "traced" and event.handle)
        return {f"{event.chain} # handle {event.handle}" for event in seen
                if event.packet == begin.packet and event.table == "kproxy" and event.handle}  # fmt: skip


class CountingPlay(ExplainedPlay):
    """A play whose BPF programs count connections by frontend and endpoint."""

    config: ClassVar[Json] = {"kproxy": {"trafficMetrics": "endpoint"}}

    def counters(self) -> Counter[tuple[str, str]]:
        """Return the connections by frontend and endpoint."""
        family = Family.IPV4 if self._family == "ipv4" else Family.IPV6
        with self._stage.topology["node"].entered():
            found = Traffic(Settings()).read(family)
        sums = Counter[tuple[str, str]]()
        for (address, _, port), endpoint, number, *_ in found:
            assert address is not None
            assert endpoint is not None
            sums[format_socket(address, port), format_socket(*endpoint)] += number
        return sums


@pytest.fixture
def counting(family: str, tmp_path: Path) -> Iterator[CountingPlay]:
    with closing(CountingPlay("ebpf", family, tmp_path)) as play:
        yield play


@pytest.fixture
def play(mode: str, family: str, tmp_path: Path) -> Iterator[ExplainedPlay]:
    with closing(ExplainedPlay(mode, family, tmp_path)) as play:
        yield play


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["nftables", "iptables", "ebpf", "userspace"])
def test_packets_have_the_fate_of_the_explanation(play: ExplainedPlay, mode: str, family: str) -> None:
    world = World(Random(f"explained {mode} {family}"))
    cases = 0
    shown = cycle((True, False))
    while cases < CASES:
        play.apply(world)
        play.show_bridged_packets(next(shown))
        answers = play.compared(list(world.attempts()))
        cases += len(answers)
        verdicts = {answer["kernel"]["verdict"] for answer in answers}
        assert verdicts <= ({"agrees"} if mode in EXACT else {"agrees", "deviates by design"})
        assert [answer for answer in answers if answer["kernel"]["verdict"] == "agrees"
                and answer["outcome"] != answer["kernel"]["outcome"]] == []  # fmt: skip
        assert [answer for answer in answers if answer["kernel"]["filters"]] == [], "no other program filters"


SERVICE = {"service": {
    "name": "any0", "type": "ClusterIP", "clusterIP": "$vip1", "externalIPs": ["$ext1"],
    "ports": [{"name": "p0", "port": 80, "protocol": "TCP"}],
}}  # fmt: skip
ENDPOINT = {"slice": {
    "service": "any0", "name": "any0-0", "endpoints": [{"at": "pod3", "ready": True}],
    "ports": [{"name": "p0", "port": 8080, "protocol": "TCP"}],
}}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["userspace"])
def test_a_bridged_pod_reaches_external_ips_unless_iptables_sees_it_on_its_port(
    play: ExplainedPlay, mode: str, family: str
) -> None:
    play.apply_changes([SERVICE, ENDPOINT])
    service = SERVICE["service"]
    for shown, client, outcome in (
        (True, "pod1", "dropped"), (True, "pod2", "reached"), (True, "client", "reached"),
        (False, "pod1", "reached"), (False, "pod2", "reached"),
    ):  # fmt: skip
        play.show_bridged_packets(shown)
        attempt = Attempt(client, "ext", "ext1", 80, service, "p0", "TCP")
        predicted = play.predicted(attempt, play.explained(attempt))
        assert (attempt.client, predicted.outcome) == (client, outcome)
        assert play.problem(attempt, predicted) == ""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", CHAINS)
def test_the_rules_that_count_a_packet_are_those_of_the_explanation(
    play: ExplainedPlay, mode: str, family: str
) -> None:
    for attempt, answer in play.cases(f"counted {mode} {family}", is_load_balanced):
        counted = play.counted(attempt, CHAINS[mode])
        assert counted
        assert counted <= objects_of(answer)


LOOPBACK_PORTS = {"service": {
    "name": "any0", "type": "NodePort", "clusterIP": "$vip1", "ports": [
        {"name": "tcp", "port": 80, "protocol": "TCP", "nodePort": 30080},
        {"name": "udp", "port": 80, "protocol": "UDP", "nodePort": 30080},
    ],
}}  # fmt: skip
LOOPBACK_ENDPOINTS = {"slice": {
    "service": "any0", "name": "any0-0",
    "endpoints": [{"at": "pod1", "ready": True}, {"at": "pod3", "ready": True}],
    "ports": [{"name": "tcp", "port": 8080, "protocol": "TCP"},
              {"name": "udp", "port": 8080, "protocol": "UDP"}],
}}  # fmt: skip


class LoopbackPlay(ExplainedPlay):
    """A play whose node ports are served on loopback addresses where the mode can."""

    config: ClassVar[Json] = {"nodePortAddresses": ["primary", "localhost"]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["nftables", "iptables", "ebpf", "userspace"])
@pytest.mark.parametrize("make", [ExplainedPlay, LoopbackPlay])
def test_node_ports_on_loopback_are_explained(
    make: type[ExplainedPlay], mode: str, family: str, tmp_path: Path
) -> None:
    with closing(make(mode, family, tmp_path)) as play:
        play.apply_changes([LOOPBACK_PORTS, LOOPBACK_ENDPOINTS])
        for address in ("loopback", "127.0.0.2") if family == "ipv4" else ("loopback",):
            for protocol in ("TCP", "UDP"):
                attempt = Attempt("node", "node port", address, 30080, LOOPBACK_PORTS["service"],
                                  protocol.lower(), protocol)  # fmt: skip
                answer = play.settled(attempt)
                kernel, outcome = answer["kernel"], answer["outcome"]
                found = play.dialled(attempt).kind
                assert outcome == kernel["outcome"], answer
                assert (outcome == "forwarded") is (found == REACHED), (found, str(attempt), answer)
                assert kernel["verdict"] == "agrees" or mode == "userspace", answer


def is_load_balanced(attempt: Attempt, answer: dict[str, Any]) -> bool:
    """Return whether connections of *attempt* are forwarded, each to an endpoint chosen at random."""
    return answer["kernel"]["outcome"] == "forwarded" and not attempt.sticky


def objects_of(answer: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the kernel's objects in *answer*, after their places."""
    return {(item["where"], item["text"]) for item in answer["kernel"]["objects"]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["ebpf"])
def test_the_map_elements_that_count_a_connection_are_those_of_the_explanation(
    counting: CountingPlay, mode: str, family: str
) -> None:
    def is_counted(attempt: Attempt, answer: dict[str, Any]) -> bool:
        return attempt.protocol == "TCP" and any(
            where == "BPF map frontends" for where, _ in objects_of(answer))

    for attempt, answer in counting.cases(f"counted {mode} {family}", is_counted):
        shown = objects_of(answer)
        ((frontend, endpoint),) = counting.counted(attempt, ("",))
        assert any(where == "BPF map frontends" and text.startswith(f"{frontend} -> ")
                   for where, text in shown)  # fmt: skip
        assert any(where == "BPF map slots" and text.endswith(f" : {endpoint}") for where, text in shown)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["nftables"])
def test_the_rules_that_a_packet_meets_are_those_of_the_explanation(
    play: ExplainedPlay, mode: str, family: str
) -> None:
    def is_traced(attempt: Attempt, answer: dict[str, Any]) -> bool:
        return answer["frontend"] is not None and not attempt.sticky and attempt.client == "node"

    for attempt, answer in play.cases(f"traced {mode} {family}", is_traced):
        handles = {f"{where.partition(' ')[2]} # handle {text.rpartition(' ')[2]}"
                   for where, text in objects_of(answer) if where.startswith("chain ")}  # fmt: skip
        met = play.traced(attempt)
        assert met
        assert {rule for rule in met if not rule.startswith(RECORDS)} <= handles

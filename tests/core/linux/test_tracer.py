"""What happened to a packet, from the announcements about rules and flows."""

import pytest

from kproxy_conformance.builders import destinations
from kproxy_core.linux.conntrack import FlowTuple
from kproxy_core.linux.conntrack_events import FlowEvent, FlowEventType
from kproxy_core.linux.tracing import (
    INVALID,
    NEW,
    PATIENCE,
    TRACKED_ALREADY,
    UNTRACKED,
    FindDialled,
    Match,
    TracedPacket,
    TraceEvent,
    Tracer,
    receiving_chains,
)
from kproxy_core.model.address import Address, Family, Protocol, parse_address
from kproxy_core.model.service import Destination

CLIENT, VIP, NODE = map(parse_address, ("10.1.1.9", "10.96.0.10", "192.0.2.10"))
(ENDPOINT,) = destinations("10.1.2.3:8080")
WAY = FlowTuple(CLIENT, 40000, VIP, 80)
TABLE = "kproxy-trace-7"

TO_VIP = Match(Family.IPV4, VIP, Protocol.TCP, 80, None)


def tracer(match: Match = TO_VIP, dialled: FindDialled | None = None) -> Tracer:
    return Tracer(TABLE, [match], {NODE}.__contains__, [ENDPOINT], dialled)


def met(chain: str, verdict: str, *, table: str = "kproxy", handle: int = 3, packet: int = 1,
        is_rule: bool = True, way: FlowTuple | None = None, device: int = 2) -> TraceEvent:  # fmt: skip
    return TraceEvent(packet, is_rule, "ip", table, chain, handle, verdict, 6, way, device)


BEGIN = met("before-prerouting", "continue", table=TABLE, way=WAY)
BEHIND = met("tracked-prerouting", "continue", table=TABLE, way=WAY)


def flow(change: FlowEventType = FlowEventType.NEW, way: FlowTuple = WAY, answered: bool = False,
         source: Address = CLIENT, endpoint: tuple[Address, int] = ENDPOINT) -> FlowEvent:  # fmt: skip
    reply = FlowTuple(endpoint[0], endpoint[1], source, way.source_port)
    return FlowEvent(change, 6, way, reply, answered)


def finished(made: Tracer, now: float = 0.0) -> TracedPacket:
    (packet,) = made.finished(now)
    return packet


def test_a_packet_that_is_forwarded_has_its_rules_its_endpoint_and_the_time_of_the_answer() -> None:
    made = tracer()
    made.trace(BEGIN, 1.0)
    rule = met("services", "goto tcp-cluster-2")
    made.trace(rule, 1.0)
    made.flow(flow(source=NODE), 1.0)
    assert list(made.finished(1.1)) == []
    made.flow(flow(FlowEventType.UPDATED, answered=True, source=NODE), 1.25)
    packet = finished(made, 1.25)
    assert packet.rules == [rule]
    assert (packet.endpoint, packet.source, packet.translated) == (ENDPOINT, NODE, True)
    assert packet.answered == 0.25
    assert not made.is_busy


def test_a_rule_that_drops_is_the_last_one() -> None:
    made = tracer()
    made.trace(BEGIN, 1.0)
    made.trace(met("reject-traffic", "drop"), 1.0)
    packet = finished(made, 1.0)
    assert packet.dropped
    assert packet.rules[-1].chain == "reject-traffic"
    assert packet.endpoint is None


def test_a_chain_s_policy_can_drop() -> None:
    made = tracer()
    made.trace(BEGIN, 1.0)
    policy = met("FORWARD", "drop", table="filter", handle=0, is_rule=False)
    made.trace(policy, 1.0)
    assert finished(made, 1.0).rules == [policy]


def test_an_endpoint_that_refuses_ends_the_flow_without_an_answer() -> None:
    made = tracer()
    made.flow(flow(), 1.0)
    made.flow(flow(FlowEventType.ENDED), 1.0)
    packet = finished(made, 1.0)
    assert (packet.refused, packet.endpoint) == (True, ENDPOINT)


def test_without_an_answer_a_packet_is_finished_after_a_while() -> None:
    made = tracer()
    made.flow(flow(), 1.0)
    assert list(made.finished(1.0 + PATIENCE / 2)) == []
    assert finished(made, 1.0 + PATIENCE).answered is None


def test_other_packets_and_packets_sent_again_are_left_out() -> None:
    made = tracer()
    made.trace(met("prerouting", "continue", table="kproxy-trace-8", way=WAY, packet=5), 1.0)
    made.trace(met("services", "accept", packet=5), 1.0)
    made.flow(flow(way=WAY._replace(port=81)), 1.0)
    made.flow(flow(FlowEventType.UPDATED, way=WAY._replace(source_port=9)), 1.0)
    assert not made.is_busy
    made.trace(BEGIN, 1.0)
    made.trace(met("services", "accept"), 1.0)
    made.trace(BEGIN._replace(packet=2), 1.9)
    made.trace(met("services", "accept", packet=2), 1.9)
    assert len(finished(made, 9.0).rules) == 1
    made.trace(BEGIN._replace(packet=3), 9.0)
    assert not made.is_busy


def test_rules_count_that_are_announced_after_the_flow() -> None:
    made = tracer()
    made.flow(flow(), 1.0)
    made.trace(BEGIN, 1.0)
    made.trace(met("services", "accept"), 1.0)
    assert len(finished(made, 9.0).rules) == 1


def test_node_ports_and_senders_are_matched() -> None:
    to_node = FlowTuple(CLIENT, 40000, NODE, 30080)
    made = tracer(match=Match(Family.IPV4, None, Protocol.TCP, 30080, CLIENT))
    made.flow(flow(way=to_node._replace(source=VIP)), 1.0)
    made.flow(flow(way=to_node._replace(destination=VIP)), 1.0)
    assert not made.is_busy
    made.flow(flow(way=to_node), 1.0)
    assert made.is_busy


def test_connections_straight_to_an_endpoint_count_if_sockets_may_have_dialled_the_frontend() -> None:
    direct = FlowTuple(CLIENT, 40000, *ENDPOINT)
    dialled: dict[str, FindDialled | None] = {
        "no socket is translated": None,
        "unknown": lambda protocol, way: None,
        "the frontend": lambda protocol, way: Destination(VIP, 80) if way == direct else None,
        "another frontend": lambda protocol, way: Destination(VIP, 81),
    }
    seen = {}
    for name, find in dialled.items():
        made = tracer(dialled=find)
        made.flow(flow(way=direct), 1.0)
        seen[name] = [packet.dialled for packet in made.finished(9.0)]
    assert seen == {
        "no socket is translated": [], "unknown": [None], "the frontend": [Destination(VIP, 80)],
        "another frontend": []}


def test_a_packet_keeps_its_rules_behind_a_bridge_though_its_number_changes() -> None:
    made = tracer()
    received = met("received-0", "continue", table=TABLE, way=WAY, device=7)
    made.trace(received, 1.0)
    made.trace(received._replace(packet=2, input=2), 1.0)
    made.trace(BEGIN._replace(packet=2), 1.0)
    dropped = met("forward", "drop", way=WAY._replace(destination=ENDPOINT[0], port=8080), packet=3)
    made.trace(dropped, 1.0)
    packet = finished(made, 1.0)
    assert (packet.rules, packet.dropped, packet.has_arrived) == ([dropped], True, True)


def test_rules_of_a_packet_that_is_sent_again_do_not_count() -> None:
    made = tracer()
    made.trace(BEGIN, 1.0)
    made.trace(BEGIN, 1.5)
    made.trace(met("forward", "drop", way=WAY), 1.5)
    made.trace(met("forward", "drop", way=WAY, packet=9), 1.5)
    assert not finished(made, 2.0).dropped


@pytest.mark.parametrize(("verdict", "state"), [
    ("continue", NEW), ("jump tracked-already", TRACKED_ALREADY), ("jump untracked", UNTRACKED),
    ("jump invalid", INVALID), ("", ""),
])  # fmt: skip
def test_what_connection_tracking_takes_a_packet_for(verdict: str, state: str) -> None:
    made = tracer()
    made.trace(BEGIN, 1.0)
    if verdict:
        made.trace(BEHIND._replace(verdict=verdict), 1.0)
    packet = finished(made, 9.0)
    assert (packet.state, packet.has_arrived) == (state, True)


def test_a_policy_of_the_marking_chains_begins_no_packet() -> None:
    made = tracer()
    made.trace(BEGIN._replace(is_rule=False, handle=0, verdict="accept"), 1.0)
    assert not made.is_busy


@pytest.mark.parametrize(
    ("number", "parts"), [(1, [1]), (255, [255]), (256, [255, 1]), (600, [255, 255, 90])])
def test_a_chain_has_as_many_interfaces_as_the_kernel_allows(number: int, parts: list[int]) -> None:
    devices = [f"device{each}" for each in range(number)]
    chains = receiving_chains([], devices)
    hooks = [chain.hook for chain in chains if chain.hook is not None]
    assert [len(hook.devices) for hook in hooks] == parts
    assert [device for hook in hooks for device in hook.devices] == devices
    assert len({chain.name for chain in chains}) == len(parts)

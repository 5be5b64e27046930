"""``kproxy trace``: what happens to the next packets to a frontend."""

import os
import selectors
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

import click

from kproxy_core.app.explain import Sender, parse_sender
from kproxy_core.app.requests import Explain
from kproxy_core.cli.explain import OUTCOMES, Packets, ask_proxy, explain_objects
from kproxy_core.cli.options import OBJECTS, OUTPUT, VERBOSE, FlagCommand, given, with_flags
from kproxy_core.cli.run import cli_errors, registry_of
from kproxy_core.cli.terminal import encoded_event, faint, hint, show, strong
from kproxy_core.config.flags import RULES, SOURCES, Flags
from kproxy_core.contract.errors import PluginFailed
from kproxy_core.linux.addresses import node_addresses
from kproxy_core.linux.conntrack import FlowTuple, find_flow
from kproxy_core.linux.conntrack_events import flow_events
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.links import read_links
from kproxy_core.linux.node_state import legacy_tables
from kproxy_core.linux.tracing import (
    INVALID,
    PATIENCE,
    TABLES,
    TRACKED_ALREADY,
    UNTRACKED,
    FindDialled,
    Marks,
    Match,
    RuleTexts,
    TracedPacket,
    Tracer,
    chains_before_ip,
    trace_events,
)
from kproxy_core.model.address import Address, Protocol, family_of, format_address, format_socket, is_loopback
from kproxy_core.model.service import Destination
from kproxy_core.plan.fate import Origin

FindOrigin = Callable[[Address], Origin]
"""Return the side of a packet's sender. Raises as `read_answers` does."""


def read_answers(target: str, flags: Flags) -> tuple[Packets, FindDialled | None]:
    """Return the answers of ``kproxy explain`` about *target*, and a function that finds dialled frontends.

    The function is None if the mode never redirects a socket to an endpoint before its first packet.

    Raises NoAnswer, NoProxy or RequestRefused, and as `cli_errors` expects.
    """
    answers = _explained(Explain(to=target), flags)
    registry = registry_of(flags)
    mode = answers[0]["kernel"]["mode"]

    def dialled(protocol: int, way: FlowTuple) -> Destination | None:
        source, endpoint = way[:2], way[2:]
        with suppress(HostError, PluginFailed):
            return registry.dialled(mode, Protocol(protocol), Destination(*source), Destination(*endpoint))
        return None

    return answers, dialled if registry.load(mode).base else None


def origin_of(target: str, flags: Flags, sender: Address) -> Origin:
    """Return the side on which ``kproxy explain`` sees *sender* of packets to *target*.

    Raises as `read_answers` does.
    """
    answers = _explained(Explain(to=target, sender=format_address(sender)), flags)
    return Origin(answers[0]["origin"])


def _explained(request: Explain, flags: Flags) -> Packets:
    if OBJECTS & set(flags):
        return explain_objects(request, flags, this_machine=True)
    return ask_proxy(request)


_MOST_ENDPOINTS = 100
"""Endpoints marked in modes whose sockets dial them: each takes a rule at every hook."""


class Trace:
    """Watches for packets to the frontends of *answers*, which are those of ``kproxy explain``."""

    def __init__(
        self, answers: Packets, sender: Sender, dialled: FindDialled | None, origin_of: FindOrigin
    ) -> None:
        """*dialled* finds the frontend of a connection whose first packet is sent to an endpoint.

        It is None if the mode has no such connections.
        """
        self._origin, self._origin_of = sender.origin, cache(origin_of)
        self._owners = {
            _match(answer, sender.address): answer["frontend"]["service_port"] if answer["frontend"] else ""
            for answer in answers
        }
        by_protocol = {(Protocol[answer["protocol"]], Destination.parse(each["endpoint"])): None
                       for answer in answers for each in answer["endpoints"]}
        endpoints = {endpoint for _, endpoint in by_protocol}
        self._not_chosen = {Destination.parse(each["endpoint"]): each["because"]
                            for answer in answers for each in answer["not_chosen"]}
        self._matches = list(self._owners)
        if dialled is not None:
            self._matches += [Match(family_of(address), address, protocol, port, sender.address)
                              for protocol, (address, port) in by_protocol][:_MOST_ENDPOINTS]
        self._local = node_addresses(lambda _: True)
        self._table = f"{TABLES}{os.getpid()}"
        self._tracer = Tracer(
            self._table, list(self._owners), self._local.__contains__, endpoints, dialled)
        self._endpoints, self._at_sockets = endpoints, dialled is not None
        self._texts = RuleTexts()
        self._blind = ""
        """The reason why rules, and so drops, are not seen; "" if they are."""
        self._before_ip: list[str] = []
        """The chains that packets meet before IP does."""
        self._unwatched = ""
        """The reason why packets are not seen at these; "" if they are."""
        self._arrived: int | None = None
        """Packets that came to the first hook of IP, and may have opened connections; None: not known."""

    def packets(self, *, count: int, seconds: float) -> Iterator[dict[str, Any]]:
        """Yield the fate of up to *count* packets during *seconds*. Raises HostError."""
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            flows = stack.enter_context(flow_events())
            traces = stack.enter_context(trace_events())
            marks: Marks | None = None
            try:
                marks = stack.enter_context(Marks(self._table, self._matches, self._devices()))
                self._unwatched = marks.problem
            except HostError as error:
                self._blind = f"rules are not seen, only connections: {error}"
            for events in (flows, traces):
                selector.register(events, selectors.EVENT_READ)
            if marks is not None:
                stack.callback(self._count, marks)
            ends = time.monotonic() + seconds
            while count and time.monotonic() < ends + PATIENCE:
                selector.select(0.05)
                now = time.monotonic()
                for event in traces.read():
                    self._tracer.trace(event, now)
                for flow in flows.read():
                    self._tracer.flow(flow, now)
                for packet in self._tracer.finished(now):
                    if count and packet.began < ends and self._is_wanted(packet):
                        count -= 1
                        yield self._described(packet, now)
                if now >= ends and not self._tracer.is_busy:
                    return

    def _count(self, marks: Marks) -> None:
        with suppress(HostError):
            self._arrived = marks.arrived()

    def _devices(self) -> list[str]:
        """Return the interfaces at which packets must be marked, so that all rules are seen.

        Raises HostError.
        """
        found = chains_before_ip()
        self._before_ip = list(dict.fromkeys(f"{each.family} {each.table} {each.name}" for each in found))
        return [link.name for link in read_links() if link.is_up] if found else []

    def _is_wanted(self, packet: TracedPacket) -> bool:
        if packet.state == TRACKED_ALREADY and not packet.dropped:
            is_misled = self._is_misled(packet)
            if not is_misled and packet.protocol != Protocol.TCP:  # Other datagrams open no connection.
                return False
        return self._origin is None or self._origin_of(packet.way.source) is self._origin

    def _is_misled(self, packet: TracedPacket) -> bool:
        """Return whether an older entry of connection tracking leads a packet to where no new one goes."""
        with suppress(HostError):
            reply = find_flow(packet.protocol, packet.way)
            if reply is not None and packet.endpoint is None:
                packet.endpoint = Destination(reply.source, reply.source_port)
                packet.source = reply.destination
                packet.translated = packet.endpoint != (packet.way.destination, packet.way.port)
        return packet.endpoint is not None and packet.endpoint not in self._endpoints and (
            not self._is_relay(packet.endpoint))

    def unseen(self, target: str, seconds: float) -> str:
        """Return what is known of packets to *target* if none was shown for *seconds*, in sentences."""
        said = f"no packet to {target} was seen in {seconds:g} s"
        if self._blind or self._arrived is None:
            return f"{said}: what drops packets before they open a connection is not known"
        if self._arrived:
            return (f"{said}: {self._arrived} came here and are not shown. They belong to connections from "
                    "before, are not from the sender or to the frontend that was asked for, or were too many")
        said += (": none came to this node's rules for IP. It was not sent, took another way, or was dropped "
                 "before")
        chains = ", ".join(self._before_ip)
        if self._unwatched:
            said += f": maybe by {chains}, which cannot be watched ({self._unwatched})"
        elif chains:
            said += f", and not by {chains}, which were watched"
        return f"{said}. Programs of XDP and tc are not seen"

    @property
    def problems(self) -> list[str]:
        """The reasons why rules were not seen, or are shown without their texts."""
        texts = [f"rules are shown by their handles: {problem}" for problem in self._texts.problems]
        return [self._blind, *texts] if self._blind else texts

    def _described(self, packet: TracedPacket, now: float) -> dict[str, Any]:
        rules = [
            {"where": f"{rule.family} {rule.table} {rule.chain}", "text": self._texts.text(rule),
             "verdict": rule.verdict}
            for rule in packet.rules
        ]
        began = datetime.fromtimestamp(time.time() - (now - packet.began), UTC)
        way = packet.way
        first = Destination(way.destination, way.port)
        dialled = packet.dialled or first
        # A socket may have chosen the endpoint before the packet existed.
        at_socket = self._at_sockets and first in self._endpoints
        return {
            "time": began.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "from": format_socket(way.source, way.source_port),
            "to": format_socket(*dialled),
            "protocol": Protocol(packet.protocol).name,
            "service_port": self._owner(packet.protocol, dialled),
            **_outcome(packet, rules, at_socket=at_socket, is_relay=self._is_relay(packet.endpoint),
                       endpoints=self._endpoints, not_chosen=self._not_chosen, is_blind=bool(self._blind)),
            "rules": rules,
        }  # fmt: skip

    def _is_relay(self, endpoint: Destination | None) -> bool:
        """Return whether the packets go to a process of this node that is no endpoint."""
        if endpoint is None or endpoint in self._endpoints:
            return False
        return is_loopback(endpoint.address) or endpoint.address in self._local

    def _owner(self, protocol: int, dialled: Destination) -> str:
        for match, owner in self._owners.items():
            same = (match.protocol, match.port) == (protocol, dialled.port)
            if same and match.destination in (None, dialled.address):
                return owner
        return next(iter(self._owners.values()), "")


def _outcome(
    packet: TracedPacket, rules: Sequence[Mapping[str, str]], *, at_socket: bool, is_relay: bool,
    endpoints: Collection[Destination], not_chosen: Mapping[Destination, str], is_blind: bool,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "endpoint": "", "relay": is_relay, "source": "", "answered_ms": None, "because": "", "ask": "",
    }
    if packet.dropped:
        refused = "reject" in rules[-1]["text"].lower()
        early = "" if packet.state or packet.endpoint else ", before any rule of Services"
        rule = f"{rules[-1]['where']}: {rules[-1]['text']}{early}"
        return {**found, "outcome": "refused" if refused else "dropped", "because": rule}
    if packet.state == UNTRACKED:
        rule = _last(rules, "notrack") or "a rule"
        return {**found, "outcome": "not touched", "because": (
            f"not tracked, so that no rule translates it: {rule}")}
    if packet.endpoint is None:
        return {**found, "outcome": "unknown", "because": _unknown(packet, is_blind=is_blind),
                "ask": "kproxy doctor"}
    found["source"] = "kept"
    if packet.source is not None and packet.source != packet.way.source:
        found["source"] = f"masqueraded to {format_address(packet.source)}"
    if packet.answered is not None:
        found["answered_ms"] = round(packet.answered * 1000, 1)
    elif packet.refused:
        found["because"] = f"refused by the {'relay' if is_relay else 'endpoint'}"
    else:
        found["because"] = f"no answer in {PATIENCE:.0f} s"
        found["ask"] = "kproxy doctor"
    if not packet.translated and not at_socket:
        return {**found, "outcome": "not touched"}
    if packet.endpoint not in endpoints and not is_relay:
        by = _last(rules, "dnat", "redirect") or (
            "an older entry of connection tracking, which conntrack -D deletes"
            if packet.state == TRACKED_ALREADY else "")
        why = not_chosen.get(packet.endpoint, "no endpoint of the Service")
        foreign = f"which was {why} when the trace began" + (f": {by}" if by else "")
        found["because"] = f"{foreign}, {found['because']}".removesuffix(", ")
        found["ask"] = "kproxy explain"
    if at_socket:
        found["because"] = found["because"] or (
            "chosen when the socket connected" + ("" if packet.dialled else ", or dialled directly"))
    return {**found, "outcome": "forwarded", "endpoint": format_socket(*packet.endpoint)}


def _last(rules: Sequence[Mapping[str, str]], *words: str) -> str:
    """Return the last rule that has one of *words*, with its place; "" if none has."""
    found = (f"{rule['where']}: {rule['text']}" for rule in reversed(rules)
             if any(word in rule["text"].lower() for word in words))
    return next(found, "")


def _unknown(packet: TracedPacket, *, is_blind: bool) -> str:
    """Return why it is not known what became of a packet that opened no connection."""
    if packet.state == INVALID:
        return "connection tracking takes it for invalid, so that no rule translates it"
    dropped = "and rules are not seen" if is_blind else "and no rule of nf_tables was seen to drop it"
    if not packet.has_arrived and packet.passed:
        return f"it did not come from the interface to the rules for IP, {dropped}"
    where = "" if packet.state or not packet.passed else " and did not come to connection tracking"
    legacy = legacy_tables()
    return f"it opened no connection{where}, {dropped}" + (
        f"; rules of legacy tables are not seen ({', '.join(legacy)})" if legacy else "")


def formatted(packet: Mapping[str, Any], output: str) -> str:
    """Return one packet as text, or as one of many values of JSON or YAML."""
    if output != "text":
        return encoded_event(packet, output)
    of = f" of {packet['service_port']}" if packet["service_port"] else ""
    lines = [f"{faint(packet['time'])} {packet['from']} -> {strong(packet['to'])}/{packet['protocol']}{of}"]
    words = [OUTCOMES[packet["outcome"]](packet["outcome"])]
    at = "a relay at " if packet["relay"] else ""
    words[0] += f" to {at}{packet['endpoint']}" if packet["endpoint"] else ""
    if packet["source"]:
        words.append(f"source {packet['source']}")
    if packet["answered_ms"] is not None:
        after = packet["answered_ms"]
        words.append(f"answered after {after} ms" if after >= 1 else "answered within 1 ms")
    if packet["because"]:
        words.append(packet["because"])
    lines.append(f"  {', '.join(words)}")
    if packet["ask"]:
        lines.append(f"  {hint(_ASK[packet['ask']])}")
    width = max((len(rule["where"]) for rule in packet["rules"]), default=0)
    lines += [f"  {rule['where']:{width}}  {faint(_shown(rule))}" for rule in packet["rules"]]
    return "\n".join(lines)


_ASK = {
    "kproxy doctor": "`kproxy doctor` looks for what else loses packets: routing, sysctls, bridges",
    "kproxy explain": "`kproxy explain` says which rules come before those of Services",
}


def _shown(rule: Mapping[str, str]) -> str:
    """Return the text of a rule, with the verdict if the text has a verdict map instead."""
    return f"{rule['text']} => {rule['verdict']}" if "vmap" in rule["text"] else rule["text"]


def _match(answer: Mapping[str, Any], source: Address | None) -> Match:
    destination, port = Destination.parse(answer["to"])
    frontend = answer["frontend"]
    of_node = frontend is not None and frontend["kind"] == "node port"
    return Match(
        family_of(destination), None if of_node else destination, Protocol[answer["protocol"]], port, source)


@click.command("trace", cls=FlagCommand)
@click.argument("words", metavar="[FROM] TO", nargs=-1, required=True)
@click.option("--count", metavar="N", type=click.IntRange(1), default=10, show_default=True,
              help="Exit after N packets.")
@click.option("--seconds", metavar="SECONDS", type=click.FloatRange(0.1, 3600), default=30, show_default=True,
              help="Exit after SECONDS.")
@VERBOSE
@with_flags(RULES, SOURCES)
@OUTPUT
def command(words: tuple[str, ...], count: int, seconds: float, output: str, **options: Any) -> int:
    """Watch the next packets to a Service, and show what happens to each.

    FROM and TO are as for `kproxy explain`; without FROM, the packets of any sender are shown. Shows only the
    first packets of connections, at most 50 per second, from the interface on where other programs have rules
    there. With -o json, each packet is one line. Exit status: 0 if a packet was seen, else 1.
    """
    if len(words) > 2:
        raise click.UsageError("give [FROM] TO")
    flags, target = given(options), words[-1]
    seen, began = 0, time.monotonic()
    watch: Trace | None = None
    try:
        with cli_errors():
            wanted = parse_sender(words[0] if len(words) == 2 else "")
            answers, dialled = read_answers(target, flags)
            watch = Trace(answers, wanted, dialled, partial(origin_of, target, flags))
            for packet in watch.packets(count=count, seconds=seconds):
                show(formatted(packet, output))
                seen += 1
    except KeyboardInterrupt:
        seconds = round(time.monotonic() - began, 1)
    for problem in watch.problems if watch is not None else ():
        click.echo(f"Warning: {problem}", err=True)
    if not seen:
        click.echo(watch.unseen(target, seconds) if watch is not None else (
            f"no packet to {target} was seen"), err=True)
    return 0 if seen else 1

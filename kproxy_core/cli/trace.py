"""``kproxy trace``: what happens to the next packets to a frontend."""

import os
import selectors
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

import click

from kproxy_core.app.explain import Sender, parse_sender
from kproxy_core.app.requests import Explain
from kproxy_core.cli.explain import OUTCOMES, Packets, ask_proxy, explain_objects
from kproxy_core.cli.options import OBJECTS, OUTPUT, VERBOSE, FlagCommand, given, with_flags
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.terminal import encoded_event, faint, show, strong
from kproxy_core.config.flags import RULES, SOURCES, Flags
from kproxy_core.contract.errors import PluginFailed
from kproxy_core.contract.registry import Registry
from kproxy_core.linux.addresses import node_addresses
from kproxy_core.linux.conntrack import FlowTuple, flow_events
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.tracing import (
    PATIENCE,
    FindDialled,
    Match,
    RuleTexts,
    TracedPacket,
    Tracer,
    open_table,
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
    registry = Registry(plugins=flags["plugin"].split(",") if "plugin" in flags else ())
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
        endpoints = {Destination.parse(e["endpoint"]) for answer in answers for e in answer["endpoints"]}
        self._local = node_addresses(lambda _: True)
        self._table = f"kproxy-trace-{os.getpid()}"
        self._tracer = Tracer(
            self._table, list(self._owners), self._local.__contains__, endpoints, dialled)
        self._endpoints, self._at_sockets = endpoints, dialled is not None
        self._texts = RuleTexts()
        self._blind = ""
        """The reason why rules, and so drops, are not seen; "" if they are."""

    def packets(self, *, count: int, seconds: float) -> Iterator[dict[str, Any]]:
        """Yield the fate of up to *count* packets during *seconds*. Raises HostError."""
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            flows = stack.enter_context(flow_events())
            traces = stack.enter_context(trace_events())
            try:
                stack.enter_context(open_table(self._table, list(self._owners)))
            except HostError as error:
                self._blind = f"rules are not seen, only connections: {error}"
            for events in (flows, traces):
                selector.register(events, selectors.EVENT_READ)
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

    def _is_wanted(self, packet: TracedPacket) -> bool:
        return self._origin is None or self._origin_of(packet.way.source) is self._origin

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
            **_outcome(packet, rules, at_socket=at_socket, is_relay=self._is_relay(packet.endpoint)),
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
    packet: TracedPacket, rules: Sequence[Mapping[str, str]], *, at_socket: bool, is_relay: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "endpoint": "", "relay": is_relay, "source": "", "answered_ms": None, "because": "",
    }
    if packet.dropped:
        refused = "reject" in rules[-1]["text"].lower()
        rule = f"{rules[-1]['where']}: {rules[-1]['text']}"
        return {**found, "outcome": "refused" if refused else "dropped", "because": rule}
    if packet.endpoint is None:
        return {**found, "outcome": "unknown", "because": "it opened no connection, and no rule dropped it"}
    found["source"] = "kept"
    if packet.source is not None and packet.source != packet.way.source:
        found["source"] = f"masqueraded to {format_address(packet.source)}"
    if packet.answered is not None:
        found["answered_ms"] = round(packet.answered * 1000, 1)
    elif packet.refused:
        found["because"] = f"refused by the {'relay' if is_relay else 'endpoint'}"
    else:
        found["because"] = f"no answer in {PATIENCE:.0f} s"
    if not packet.translated and not at_socket:
        return {**found, "outcome": "not touched"}
    if at_socket:
        found["because"] = found["because"] or (
            "chosen when the socket connected" + ("" if packet.dialled else ", or dialled directly"))
    return {**found, "outcome": "forwarded", "endpoint": format_socket(*packet.endpoint)}


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
    width = max((len(rule["where"]) for rule in packet["rules"]), default=0)
    lines += [f"  {rule['where']:{width}}  {faint(_shown(rule))}" for rule in packet["rules"]]
    return "\n".join(lines)


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
    first packets of connections, at most 50 per second. With -o json, each packet is one line. Exit status: 0
    if a packet was seen, else 1.
    """
    if len(words) > 2:
        raise click.UsageError("give [FROM] TO")
    flags, target = given(options), words[-1]
    seen = 0
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
        pass
    for problem in watch.problems if watch is not None else ():
        click.echo(f"Warning: {problem}", err=True)
    if not seen:
        click.echo(f"no packet to {target} was seen in {seconds:g} s", err=True)
    return 0 if seen else 1

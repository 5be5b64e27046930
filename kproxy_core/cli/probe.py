"""The packets that ``kproxy explain --probe`` sends, from this node or from a pod on it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from kproxy_core.app.errors import NoAnswer
from kproxy_core.app.explain import parse_sender
from kproxy_core.app.probe import PROTOCOLS, judged, tries
from kproxy_core.app.verify import Expectation
from kproxy_core.cli.terminal import bad, good, hint
from kproxy_core.cli.verify import Connector
from kproxy_core.linux.addresses import node_addresses
from kproxy_core.linux.conntrack_events import flow_events
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.namespaces import Neighbour, neighbour_with
from kproxy_core.model.address import Address, format_address, parse_address
from kproxy_core.plan.fate import Origin

Packet = Mapping[str, Any]

_RATE = 50.0
"""Connections and datagrams a second."""
_MOST = 20
"""To one frontend."""
_TIMEOUT = 2.0
"""Seconds: a lost SYN is sent again after one."""


def check(sender: str, origin: str) -> None:
    """Raise UsageError for a sender whose packets cannot be sent here."""
    found = parse_sender(sender, origin)
    if found.address is None and found.origin in (Origin.POD, Origin.OUTSIDE):
        example = "the address of a pod on this node" if found.origin is Origin.POD else "node"
        raise click.UsageError(
            f"--probe sends from this node, or from a pod on it: give {example} in place of "
            f"{found.origin.value!r}")


def probed(packets: Sequence[Packet]) -> tuple[list[Packet], str]:
    """Send what *packets*, answers of ``kproxy explain``, are about, and return them with a ``probe`` each.

    It is None for senders that are elsewhere. Then the reason if endpoints cannot be told apart, else "".
    Raises NoAnswer if no packet can be sent.
    """
    sent = [at for at, packet in enumerate(packets) if _may_be_sent(packet)]
    if not sent:
        raise NoAnswer("nothing was sent: --probe sends TCP and UDP from this node, or from a pod on it")
    found: list[Packet] = [{**packet, "probe": None} for packet in packets]
    senders: dict[tuple[str, str], list[int]] = {}
    for at in sent:
        senders.setdefault((packets[at]["origin"], packets[at]["from"]), []).append(at)
    problem = ""
    for of_sender in senders.values():
        results, problem = _probe([packets[at] for at in of_sender])
        for at, result in zip(of_sender, results, strict=True):
            found[at] = {**packets[at], "probe": result}
    return found, problem


def _may_be_sent(packet: Packet) -> bool:
    return packet["protocol"] in PROTOCOLS and (
        packet["origin"] == Origin.NODE.value or not packet["typical_sender"])


def _probe(packets: Sequence[Packet]) -> tuple[list[Packet], str]:
    """Return the results for *packets* of one sender. Raises NoAnswer."""
    first, problem = packets[0], ""
    tried = [tries(packet) for packet in packets]
    places: dict[tuple[str, str, bool], int] = {}
    """Of the targets by address, protocol, and whether it is an endpoint: frontends may share these."""
    targets: list[Expectation] = []
    for target, is_endpoint in ((target, at > 0) for each in tried for at, target in enumerate(each)):
        if places.setdefault((*_where(target), is_endpoint), len(targets)) == len(targets):
            targets.append(target)
    given = None if first["typical_sender"] else parse_address(first["from"])
    with ExitStack() as stack:
        more: dict[str, Any] = {}
        if first["origin"] != Origin.NODE.value:
            assert given is not None
            more["open_socket"] = stack.enter_context(_namespace_of(given)).open_socket
        events = None
        try:
            events = stack.enter_context(flow_events(only_new=True))
        except HostError as error:
            problem = f"endpoints are not told apart: {error}"
        try:
            attempts = Connector(
                targets, events, rate=_RATE, most=_MOST, timeout=_TIMEOUT, source=given, **more).run()
        except OSError as error:
            raise NoAnswer(f"nothing can be sent from {first['from']}: {error.strerror}") from error
    own = node_addresses(lambda _: True)
    return [
        judged(packet, each, [attempts[places[*_where(target), at > 0]] for at, target in enumerate(each)],
               own, knows_flows=events is not None)
        for packet, each in zip(packets, tried, strict=True)
    ], problem


def _where(target: Expectation) -> tuple[str, str]:
    return target["frontend"], target["protocol"]


@contextmanager
def _namespace_of(address: Address) -> Iterator[Neighbour]:
    with neighbour_with(address) as found:
        if found is None:
            raise NoAnswer(
                f"no pod with the address {format_address(address)} can be entered here: it is on another "
                "node, or this process sees neither its processes nor /run/netns, or lacks CAP_SYS_ADMIN")
        yield found


def status_of(packets: Sequence[Packet]) -> int:
    """Return 1 if a probe found something, or could not tell, else 0."""
    probes = [packet["probe"] for packet in packets if packet.get("probe")]
    return int(any(probe["findings"] or probe["unclear"] for probe in probes))


_MOST_SHOWN = 10
_RESULTS = {"answered": good("answers"), "refused": bad("refuses"), "hung": bad("no answer")}


def lines(packet: Packet) -> Iterator[str]:
    """Yield the results of the probe for *packet* as text."""
    probe = packet["probe"]
    where = "this node's network" if packet["origin"] == Origin.NODE.value else "the network of its pod"
    what = "connection" if packet["protocol"] == "TCP" else "datagram"
    plural = "" if probe["tried"] == 1 else "s"
    yield f"{probe['tried']} {what}{plural} from {probe['source']}, in {where}"
    by = "a relay of this node" if probe["relayed"] else "not known by whom"
    for reached in probe["through"]:
        counts = ", ".join(f"{result} {count}" for result, count in reached.items() if result != "endpoint")
        yield f"through {packet['to']}  {reached['endpoint'] or by}: {counts}"
    for each in probe["directly"][:_MOST_SHOWN]:
        yield f"directly  {each['endpoint']}: {_RESULTS.get(each['result'], bad(each['result']))}"
    if (more := len(probe["directly"]) - _MOST_SHOWN) > 0:
        yield f"and {more} more, which -o json lists"
    if probe["untried"]:
        yield f"{probe['untried']} more endpoints were not tried"
    yield from map(bad, probe["findings"])
    yield from map(hint, probe["unclear"])
    if probe["findings"]:
        yield hint("`kproxy doctor` looks for what drops packets on this node")

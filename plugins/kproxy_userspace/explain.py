"""Explanation of packets: the portals that they meet, and the relays behind them."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from kproxy_core.contract import (
    Address,
    Destination,
    EndpointShare,
    Family,
    Fate,
    Frontend,
    KernelObject,
    KernelSide,
    Origin,
    Outcome,
    Protocol,
    Question,
    Translation,
    format_address,
    format_socket,
    is_loopback,
    is_own,
    parse_address,
)
from kproxy_core.linux.relay.orders import Endpoint
from kproxy_core.nft.interpret import is_translated
from kproxy_userspace.applied import LocalPort, Relay
from kproxy_userspace.batch import iptables_rules, nft_element_text
from kproxy_userspace.kernel.portals import bridged_sources, read_portals, unaddressed_interface
from kproxy_userspace.names import PORTAL_CHAINS, TABLE
from kproxy_userspace.settings import Settings
from kproxy_userspace.skeleton import JUMPS
from kproxy_userspace.wanted import Redirect, Wanted, wanted
from kproxy_xtables.rules import ChainKey, jumps_by_chain
from kproxy_xtables.walk import Ruleset, Walk

Relays = Mapping[LocalPort, Relay]
"""The relays of this process by local port."""
Recall = Callable[[str], Mapping[int, Endpoint]]
"""Returns the endpoints of a client's affinity, by the number of the relay."""

_DIALLED = re.compile(r"(?:.*-d (\S+)/\d+ )?.*-p (tcp|udp) .*--dport (\d+) ")

_RELAYED = "relays make connections of their own: endpoints see an address of the node, and use all endpoints"
_NOT_RELAYED = "this mode leaves such packets to the node"


def explain(
    questions: Sequence[Question], settings: Settings, relays: Relays, recall: Recall, *, live: bool
) -> list[KernelSide]:
    """Return the path of each packet. *recall* asks the running relays. Raises HostError.

    Unless *live*, no sender is behind a bridge.
    """
    if not live:
        return [_as_written(question, settings) for question in questions]
    family = questions[0].node.family
    portals = _Portals(family)
    if portals.rules:
        portals.bridged = bridged_sources((question.packet.source for question in questions), family)
    recall = cache(recall)
    return [_as_is(question, settings, portals, relays, recall) for question in questions]


def frontends(family: Family) -> list[Frontend]:
    """Return the frontends of the portals in the kernel. Raises HostError."""
    portals = _Portals(family)
    rules = [rule for (_, chain), rules in portals.rules.items() if chain in PORTAL_CHAINS for rule in rules]
    found = [match.groups() for rule in rules if (match := _DIALLED.match(rule))]
    return list(dict.fromkeys([
        *(Frontend(parse_address(address) if address else None, Protocol[protocol.upper()], int(port))
          for address, protocol, port in found),
        *portals.redirects,
    ]))  # fmt: skip


def _as_is(
    question: Question, settings: Settings, portals: "_Portals", relays: Relays, recall: Recall
) -> KernelSide:
    packet = question.packet
    if settings.listen is not None:
        port = packet.port if packet.destination == settings.listen else 0
        objects: list[KernelObject] = []
    else:
        port, objects = portals.follow(question)
        arrives = port and packet.origin is not Origin.NODE
        if arrives and settings.redirects_to_interface(packet.family) and (
                name := unaddressed_interface(packet.source)):
            why = "no IPv4 address to which REDIRECT could send the packet: set bindAddress"
            objects.append(KernelObject(f"interface {name}", why))
            return KernelSide(tuple(objects), Fate(Outcome.DROPPED, why))
    relay = relays.get(LocalPort(packet.protocol, port))
    if port and relay is None:
        objects.append(KernelObject("relay", f"port {port}: this process has none"))
        return KernelSide(tuple(objects), Fate(Outcome.REFUSED, f"nothing listens on port {port}"))
    side = _side(None if relay is None else relay.wanted, port, objects)
    on_loopback = question.plan is None and is_loopback(packet.destination)
    is_meant = on_loopback or _ends(side) == _ends(_as_written(question, settings, portals.bridged))
    remembered = None
    if relay is not None and relay.wanted.affinity_seconds:
        remembered = recall(format_address(packet.source)).get(relay.number)
    where = Destination(parse_address(remembered[0]), remembered[1]) if remembered else None
    deviation = side.deviation if is_meant else ""
    return KernelSide(side.objects, side.fate, where, deviation, Translation.RELAY)


def _as_written(
    question: Question, settings: Settings, bridged: frozenset[Address] = frozenset()
) -> KernelSide:
    packet, node, plan = question.packet, question.node, question.plan
    counted = settings.counts_connections
    relays = {} if plan is None else wanted(plan, node, settings.listen, counted=counted)
    for name, relay in relays.items():
        if settings.listen is not None and (packet.destination, packet.port) == (settings.listen, name.port):
            return _side(relay, 0, [])
    rules = Ruleset(_portal_rules(relays.values(), settings.bind_in(node.family)), ("nat",))
    written = Walk(rules, question, bridged=bridged)
    relay_of_packet = None if _redirected_to(written) is None else next(iter(relays.values()), None)
    return _side(relay_of_packet, 0, list(written.objects))


def _side(relay: Wanted | None, port: int, objects: Sequence[KernelObject]) -> KernelSide:
    """Return the answer for a packet that meets *objects*, then *relay*; *port* 0: unknown."""
    if relay is None:
        fate = Fate(Outcome.UNTOUCHED, "no portal applies")
        return KernelSide(tuple(objects), fate, deviation=_NOT_RELAYED)
    endpoints = [Destination(parse_address(address), port) for address, port in relay.endpoints]
    where = f"port {port}" if port else "a free port"
    slots = Counter(endpoints)
    texts = ", ".join(
        f"{format_socket(*endpoint)}{f' ({number} of {len(endpoints)})' if number > 1 else ''}"
        for endpoint, number in slots.items()
    ) or "no endpoint: it refuses clients"  # fmt: skip
    shown = (*objects, KernelObject("relay", f"{where}: {texts}"))
    if not endpoints:
        return KernelSide(shown, Fate(Outcome.REFUSED, "the relay has no endpoint"), deviation=_RELAYED)
    choices = tuple(
        EndpointShare(where, number / len(endpoints), masqueraded=True) for where, number in slots.items())
    fate = Fate(Outcome.FORWARDED, "relayed", choices)
    return KernelSide(shown, fate, deviation=_RELAYED, translation=Translation.RELAY)


class _Portals:
    """The portals of one family in the kernel: iptables rules, or the elements of nftables maps."""

    def __init__(self, family: Family) -> None:
        """Raises HostError."""
        self.bridged: frozenset[Address] = frozenset()
        """Senders whose packets meet the rules on a port of a bridge."""
        self.redirects: dict[Frontend, list[Redirect]] = {}
        self.rules, redirects = read_portals(family)
        for redirect in redirects:
            self.redirects.setdefault(redirect.portal.frontend, []).append(redirect)

    def follow(self, question: Question) -> tuple[int, list[KernelObject]]:
        """Return the local port that the packet is redirected to, 0 for none, and the objects it meets."""
        packet = question.packet
        if self.rules:
            walk = Walk(Ruleset(self.rules, ("nat",)), question, bridged=self.bridged)
            return _redirected_to(walk) or 0, list(walk.objects)
        address, protocol, port = packet.destination, packet.protocol, packet.port
        dialled = self.redirects.get(Frontend(address, protocol, port), [])
        if is_own(address, question.node, question.addresses):
            dialled = [*dialled, *self.redirects.get(Frontend(None, protocol, port), [])]
        for redirect in dialled:
            source = redirect.portal.source
            if source is None or packet.source in source:
                text = nft_element_text(redirect, question.node.family)
                return redirect.port, [KernelObject(f"table {TABLE}", text)]
        return 0, []


def _portal_rules(relays: Iterable[Wanted], at: Address | None) -> dict[ChainKey, list[str]]:
    """Return the rules that redirect to *relays*, whose ports are unknown."""
    found = jumps_by_chain(JUMPS)
    for relay in relays:
        for portal in relay.portals:
            for table, rule in iptables_rules(Redirect(portal, 0, at)):
                chain, _, text = rule.partition(" ")
                found.setdefault((table, chain), []).append(text)
    return found


def _redirected_to(walk: Walk) -> int | None:
    """Return the port to which the packet is translated; None: it is not."""
    start = walk.start()
    passed = walk.hook("output" if start.seen.is_from_node else "prerouting", [start])
    return next((branch.seen.packet.flow.port for branch in passed if is_translated(branch.seen)), None)


def _ends(side: KernelSide) -> tuple[Outcome, set[EndpointShare]] | None:
    return None if side.fate is None else (side.fate.outcome, set(side.fate.choices))

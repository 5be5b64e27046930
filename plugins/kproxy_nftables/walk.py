"""The path of a packet through the rules, as nft prints them or as we write them. Pure.

Knows the statements of `skeleton` and of kube-proxy's table. Any other rule makes the result uncertain.
"""

import abc
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from kproxy_core.contract import (
    Address,
    Destination,
    EndpointShare,
    Fate,
    KernelObject,
    KernelSide,
    NodeView,
    Origin,
    Outcome,
    Packet,
    format_address,
    format_socket,
    is_own,
    parse_address,
    parse_network,
)
from kproxy_core.nft.elements import Element, Found
from kproxy_core.nft.rules import Verdict
from kproxy_nft.counting import CONNECTIONS
from kproxy_nftables import names
from kproxy_nftables.wanted import endpoint_key, index, parse_destination, port_key, vip_key


class TableView(abc.ABC):
    """The table of one IP family: in the kernel, or as it would be written."""

    def __init__(self, rules: Mapping[str, Sequence[str]]) -> None:
        """*rules* are those of each chain."""
        self._rules = rules

    def rules(self, chain: str) -> Sequence[str]:
        """Return the rules of a *chain*; none if it does not exist."""
        return self._rules.get(chain, ())

    @abc.abstractmethod
    def find(self, container: str, key: bytes) -> Found:
        """Return what is found at a key, None in a set. Raises KeyError.

        An address is found in the set of the ClusterIPs' networks if one of these has it.
        """

    def get(self, container: str, key: bytes) -> Found:
        """Return what is found at a key of a map; None without it."""
        try:
            return self.find(container, key)
        except KeyError:
            return None

    def holds(self, container: str, key: bytes) -> bool:
        try:
            self.find(container, key)
        except KeyError:
            return False
        return True


def walk(
    packet: Packet, node: NodeView, table: TableView, addresses: frozenset[Address] = frozenset()
) -> KernelSide:
    """Return the path of *packet*, the first of its connection. *addresses*: of the node's interfaces."""
    return _Walk(packet, node, table, addresses).way()


_IGNORED = re.compile(r"( comment \".*\")?( # handle \d+)?$")
_ENDPOINT = re.compile(r"dnat (?:ip6? )?to (?P<where>\S+:\d+)")


class _Walk:
    def __init__(
        self, packet: Packet, node: NodeView, table: TableView, addresses: frozenset[Address]
    ) -> None:
        self._addresses = addresses
        self._first = packet
        self._packet = packet
        self._node = node
        self._table = table
        self._objects: dict[KernelObject, None] = {}
        self._marked = False
        self._dnat = False
        self._masqueraded = False
        self._chosen: list[Destination | None] | None = None
        """The endpoint of each number that may be drawn; None: the kernel has none."""
        self._remembered: Destination | None = None
        self._strange = ""

    def way(self) -> KernelSide:
        outgoing = self._first.origin is Origin.NODE
        hooks = ["filter-output-pre-dnat", "nat-output"] if outgoing else [
            "filter-prerouting-pre-dnat", "nat-prerouting"]
        fate = self._ended(hooks)
        if fate is None and self._chosen is not None:
            fate = self._translated(self._chosen, outgoing=outgoing)
        elif fate is None:
            fate = self._ended(self._onwards(self._first.destination, outgoing=outgoing)) or Fate(
                Outcome.UNTOUCHED, "no rule applies")
        return KernelSide(tuple(self._objects), None if self._strange else fate, self._remembered)

    def _translated(self, chosen: Sequence[Destination | None], *, outgoing: bool) -> Fate:
        """Follow a packet whose destination is one of *chosen* now."""
        choices: dict[Destination, EndpointShare] = {}
        marked, share = self._marked, 1 / len(chosen)
        for where in filter(None, chosen):
            self._packet = self._first._replace(destination=where.address, port=where.port)
            self._dnat, self._marked, self._masqueraded = True, marked, False
            if end := self._ended(self._onwards(where.address, outgoing=outgoing)):
                return end
            if outgoing or not self._is_local(where.address):
                self._chain("nat-postrouting")
            known = choices.get(where)
            choices[where] = EndpointShare(where, (known.share if known else 0.0) + share, self._masqueraded)
        return Fate(Outcome.FORWARDED, self._last(), tuple(choices.values()))

    def _onwards(self, destination: Address, *, outgoing: bool) -> Sequence[str]:
        """Return the filter chains of a packet's hooks, after the translation."""
        is_local = self._is_local(destination)
        if outgoing:
            return ["filter-output", "filter-input"] if is_local else ["filter-output"]
        return ["filter-input"] if is_local else ["filter-forward"]

    def _is_local(self, address: Address) -> bool:
        return is_own(address, self._node, self._addresses)

    def _last(self) -> str:
        last = next(reversed(self._objects), None)
        return f"{last.where}: {last.text}" if last else ""

    def _ended(self, chains: Sequence[str]) -> Fate | None:
        """Return the first fate that chains decide; None: no chain decides."""
        ends = map(self._chain, chains)
        return next((Fate(end, self._last()) for end in ends if isinstance(end, Outcome)), None)

    def _chain(self, name: str) -> Outcome | bool:
        """Return the verdict of a chain; True: destination translated, False: none."""
        for text in self._table.rules(name):
            end = self._rule(KernelObject(f"chain {name}", text))
            if end is not None:
                return end
        return False

    def _rule(self, shown: KernelObject) -> Outcome | bool | None:
        """Return the verdict of a rule; None: the next one decides."""
        for statement in _statements(shown.text):
            if statement is None:
                self._strange = self._strange or shown.text
                self._met(KernelObject(shown.where, f"{shown.text}  (not understood)"))
                return None
            handle, found = statement
            end = handle(self, shown, found)
            if end is True:
                continue
            if end is False:
                return None
            self._met(shown)
            if isinstance(end, Outcome):
                return end
            if isinstance(end, _Translated):
                return True
            return self._chain(end.chain) or (False if end.for_good else None)
        return None

    def _met(self, shown: KernelObject) -> None:
        self._objects[shown] = None

    # Statements: True if the rule continues, False if it does not match, else its verdict.

    def _verdict_map(self, shown: KernelObject, found: "re.Match[str]") -> "_Step":
        container = found["map"]
        packet = self._first if "recorded" in container else self._packet
        if "ports" in container:
            key, text = port_key(packet.protocol, packet.port), ""
        else:
            key = vip_key(packet.destination, packet.protocol, packet.port)
            text = f"{format_address(packet.destination)} . "
        verdict = self._table.get(container, key)
        text += f"{packet.protocol.name.lower()} . {packet.port}"
        if isinstance(verdict, Element):
            self._strange = self._strange or text
            self._met(KernelObject(f"map {container}", f"{text}  (not understood)"))
        if not isinstance(verdict, Verdict):
            return False
        self._met(shown)
        self._met(KernelObject(f"map {container}", f"{text} : {verdict.text}"))
        return _verdict(verdict.text)

    def _destination_in(self, shown: KernelObject, found: "re.Match[str]") -> "_Step":
        address, container = self._packet.destination, found["set"]
        if not self._table.holds(container, address):
            return False
        self._met(KernelObject(f"set {container}", format_address(address)))
        return True

    def _mark(self, shown: KernelObject, found: "re.Match[str]") -> "_Step":
        self._met(shown)
        self._marked = True
        return True

    def _masquerade(self, shown: KernelObject, found: "re.Match[str]") -> "_Step":
        self._masqueraded = True
        return _Translated()

    def _is_hairpin_flow(self, shown: KernelObject, found: "re.Match[str]") -> "_Step":
        packet = self._packet
        key = packet.source + vip_key(packet.destination, packet.protocol, packet.port)
        return self._table.holds("hairpin-connections", key)

    def _is_hairpin(self, shown: KernelObject, found: "re.Match[str]") -> "_Step":
        source, destination = self._packet.source, self._packet.destination
        if not self._table.holds(names.HAIRPINS, source + destination):
            return False
        text = f"{format_address(source)} . {format_address(destination)}"
        self._met(KernelObject(f"set {names.HAIRPINS}", text))
        return True

    def _balance(self, shown: KernelObject, found: "re.Match[str]") -> "_Step":
        self._met(shown)
        packet, container = self._packet, found["map"]
        key = endpoint_key(packet.destination if found["address"] else b"", packet.port)
        dialled = f"{format_address(packet.destination)} . {packet.port}" if found["address"] else packet.port
        chosen: list[Destination | None] = []
        for at in range(int(found["count"])):
            value = self._table.get(container, key + index(at))
            chosen.append(parse_destination(value) if isinstance(value, bytes) else None)
        slots = Counter(chosen)
        for at, where in enumerate(chosen):
            text = f" : {format_socket(*where)}" if where else "  (missing)"
            number = f"({slots[where]} of {len(chosen)})" if where and slots[where] > 1 else at
            self._met(KernelObject(f"map {container}", f"{dialled} . {number}{text}"))
        self._chosen = chosen
        return _Translated()

    def _balance_listed(self, shown: KernelObject, found: "re.Match[str]") -> "_Step":
        """Choose one of the endpoints in the rule itself, or of the chains that it names."""
        self._met(shown)
        values = [element.partition(" : ")[2].strip() for element in found["elements"].split(",")]
        if values[0].startswith("goto "):
            self._chosen = [self._endpoint_of(value.removeprefix("goto ")) for value in values]
        else:
            hosts = [value.partition(" . ") for value in values]
            self._chosen = [Destination(parse_address(host), int(port)) for host, _, port in hosts]
        return _Translated()

    def _only_endpoint(self, shown: KernelObject, found: "re.Match[str]") -> "_Step":
        """Choose the endpoint of a Service that has only one (kube-proxy 1.37)."""
        self._met(shown)
        self._chosen = [Destination.parse(found["where"])]
        return _Translated()

    def _endpoint_of(self, chain: str) -> Destination | None:
        """Return the endpoint to which a *chain* of kube-proxy's translates; None if it does not exist."""
        for rule in self._table.rules(chain):
            if found := _ENDPOINT.search(rule):
                self._met(KernelObject(f"chain {chain}", rule))
                return Destination.parse(found["where"])
        return None

    def _pin_in_chain(self, shown: KernelObject, found: "re.Match[str]") -> "_Step":
        """Record the remembered endpoint, and continue as for a new client."""
        if self._table.holds(found["set"], self._packet.source):
            self._met(shown)
            self._remembered = self._endpoint_of(found["chain"])
        return False

    def _pin(self, shown: KernelObject, found: "re.Match[str]") -> "_Step":
        """Record the remembered endpoint, and continue as for a new client."""
        value = self._table.get(found["map"], self._packet.source)
        if not isinstance(value, bytes):
            return False
        where = Destination(Address(value[:len(self._packet.source)]), int(found["port"]))
        self._remembered = where
        self._met(shown)
        text = f"{format_address(self._packet.source)} : {format_address(where.address)}"
        self._met(KernelObject(f"map {found['map']}", text))
        return False


class _Jump(NamedTuple):
    chain: str
    for_good: bool


class _Translated:
    """The address was translated, and no later rule of the hook applies."""


_Step = bool | Outcome | _Jump | _Translated


def _verdict(text: str) -> _Step:
    how, _, chain = text.partition(" ")
    if how == "drop":
        return Outcome.DROPPED
    return _Jump(chain, how == "goto")


def _is_in(address: Address, found: "re.Match[str]") -> bool:
    """Return whether *address* matches the networks of a rule, which may negate them."""
    return any(address in _network(text) for text in found["nets"].strip("{} ").split(", ")) is not bool(
        found["no"])


_Handler = Callable[[_Walk, KernelObject, "re.Match[str]"], _Step]
_network = lru_cache(maxsize=4096)(parse_network)
_IP = r"ip6? "
_NAME = r"[^\s:]+"
_NETS = r"(?P<no>!= )?(?P<nets>[0-9a-f:./]+(?=\s)|\{ [^}]+ \})"
_HANDLERS: dict[str, _Handler] = {
    rf"ct original .*vmap @(?P<map>{_NAME})": lambda walk, shown, found: False,
    rf"ct original .*@{names.NODE_IPS}": lambda walk, shown, found: False,
    r'counter name "[^"]*"': lambda walk, shown, found: True,
    rf"update @({CONNECTIONS}|{names.REFUSED}|{names.NOT_RELAYED}) \{{.*\}}": lambda walk, shown, found: True,
    rf"({_IP}daddr \. )?meta l4proto \. th dport vmap @(?P<map>{_NAME})": _Walk._verdict_map,
    r"fib daddr type local": lambda walk, shown, found: walk._is_local(walk._packet.destination),
    r"fib saddr type local": lambda walk, shown, found: walk._packet.origin is Origin.NODE,
    rf"{_IP}daddr @(?P<set>{_NAME})": _Walk._destination_in,
    rf"{_IP}daddr {_NETS}": lambda walk, shown, found: _is_in(walk._packet.destination, found),
    rf"{_IP}saddr \. {_IP}daddr @{names.HAIRPINS}": _Walk._is_hairpin,
    rf"{_IP}saddr \. {_IP}daddr \. meta l4proto \. th dport @hairpin-connections": _Walk._is_hairpin_flow,
    rf"{_IP}saddr {_NETS}": lambda walk, shown, found: _is_in(walk._packet.source, found),
    rf"{_IP}saddr @(?P<set>{_NAME}) goto (?P<chain>{_NAME})": _Walk._pin_in_chain,
    r'iifname (?P<no>!= )?"[^"]*"':
        lambda walk, shown, found: (walk._packet.origin is Origin.POD) is not bool(found["no"]),
    r"meta mark set (meta )?mark (\||or) 0x[0-9a-f]+": _Walk._mark,
    r"meta mark (&|and) 0x[0-9a-f]+ != 0(x0+)? meta mark set (meta )?mark (\^|xor) 0x[0-9a-f]+":
        lambda walk, shown, found: walk._marked,
    r"masquerade fully-random": _Walk._masquerade,
    r"ct state new": lambda walk, shown, found: True,
    r"ct status ! dnat": lambda walk, shown, found: not walk._dnat,
    r"ct status dnat": lambda walk, shown, found: walk._dnat,
    r"meta l4proto (?P<protocol>tcp|udp|sctp)":
        lambda walk, shown, found: found["protocol"] == walk._packet.protocol.name.lower(),
    rf"drop|(jump|goto) {_NAME}": lambda walk, shown, found: _verdict(found[0]),
    r"reject with tcp reset":
        lambda walk, shown, found: walk._packet.protocol.name == "TCP" and Outcome.REFUSED,
    r"reject": lambda walk, shown, found: Outcome.REFUSED,
    rf"dnat (ip6? )?to (?P<address>{_IP}daddr \. )?(tcp|udp|sctp) dport \. "
    rf"(numgen random|jhash {_IP}saddr( \. \w+ sport)?) mod (?P<count>\d+)( seed 0x[0-9a-f]+)? "
    rf"map @(?P<map>{_NAME})": _Walk._balance,
    r"(dnat (ip6? )?(addr \. port )?to )?numgen random mod \d+ v?map \{(?P<elements>[^}]+)\}":
        _Walk._balance_listed,
    _ENDPOINT.pattern: _Walk._only_endpoint,
    rf"dnat (ip6? )?to {_IP}saddr map @(?P<map>{_NAME}?) ?: ?(?P<port>\d+)": _Walk._pin,
}
_STATEMENTS = tuple((re.compile(pattern), handler) for pattern, handler in _HANDLERS.items())


@lru_cache(maxsize=4096)
def _statements(rule: str) -> Sequence[tuple[_Handler, "re.Match[str]"] | None]:
    """Return the statements of a rule in order, up to an unknown one: None."""
    found: list[tuple[_Handler, re.Match[str]] | None] = []
    rest = _IGNORED.sub("", rule).strip()
    while rest:
        matches = ((handler, match) for pattern, handler in _STATEMENTS if (match := pattern.match(rest)))
        statement = next(matches, None)
        found.append(statement)
        if statement is None:
            break
        rest = rest[statement[1].end():].lstrip()
    return found

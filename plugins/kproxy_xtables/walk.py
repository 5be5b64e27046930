"""The way of a packet through iptables rules. Pure.

In built-in chains, only rules that lead to other chains are followed: what other tools add there is theirs.
"""

import re
from collections.abc import Callable, Container, Sequence
from functools import lru_cache

from kproxy_core.backend.api import KernelObject
from kproxy_core.model.address import Address, format_address
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.node import NodeView
from kproxy_core.plan.fate import Outcome, is_own
from kproxy_xtables.rules import BUILT_IN_CHAINS, ChainKey, RulesByChain
from kproxy_xtables.semantics import TARGETS, Branch, Flight, Rule, network, parsed

Objects = dict[KernelObject, None]
"""In the order in which a packet met them."""


class Ruleset:
    """The chains of one IP family: in the kernel, or as they would be written."""

    def __init__(self, chains: RulesByChain, *, for_many: bool = False) -> None:
        """*for_many*: many packets will be followed."""
        self._chains = chains
        self._indexes: dict[ChainKey, dict[str, list[int]]] = {}
        self._likenesses: dict[Sequence[ChainKey], Callable[[Flight], object] | None] = {}
        self.known: dict[object, tuple[Outcome | None, bool, Objects]] | None = {} if for_many else None
        """Results of `Walk.onward` and the objects met, by `likeness`."""

    def rules(self, table: str, chain: str) -> Sequence[str]:
        return self._chains.get((table, chain), ())

    def relevant(self, table: str, chain: str, flight: Flight) -> Sequence[str]:
        """Return the rules of a chain, of a long one without those for another address or port."""
        rules = self.rules(table, chain)
        if len(rules) <= _SHORT:
            return rules
        index = self._indexes.get((table, chain))
        if index is None:
            index = self._indexes[table, chain] = _index(rules)
        keys = ("", format_address(flight.destination), f"port {flight.port}")
        return [rules[number] for number in sorted(number for key in keys for number in index.get(key, ()))]

    def likeness(self, chains: Sequence[ChainKey], flight: Flight) -> object | None:
        """Return a key that flights share if no rule that *chains* lead to distinguishes them.

        Except by whether the destination is this node. None: every flight may be a case of its own.
        """
        if chains not in self._likenesses:
            self._likenesses[chains] = self._likeness(chains)
        likeness = self._likenesses[chains]
        return likeness(flight) if likeness is not None else None

    def _likeness(self, chains: Sequence[ChainKey]) -> Callable[[Flight], object] | None:
        reached = list(chains)
        values = set[tuple[str, str]]()
        for table, chain in reached:
            for text in self.rules(table, chain):
                rule = parsed(text)
                if rule.looks_further:
                    return None
                values.update(rule.places)
                if rule.target not in TARGETS and (table, rule.target) not in reached:
                    reached.append((table, rule.target))
        networks = {network(value) for name, value in values if name == "-d"}
        single = {net for net in networks if net.prefix == len(net.network) * 8}
        addresses, wider = {net.network for net in single}, tuple(networks - single)
        ports = {int(value) for name, value in values if name == "--dport"}

        def likeness(flight: Flight) -> object:
            (origin, source, _, protocol, _), to, port, *state = flight
            return (
                chains, origin, source, protocol, *state,
                to if to in addresses else None, port if port in ports else None,
                *[to in net for net in wider],
            )  # fmt: skip

        return likeness

    def in_set(self, name: str, sides: Sequence[str], packet: Flight) -> int | None:
        """Return the mark of the entry for *packet* in an ipset, 0 without marks; None: it has no entry."""
        return None

    def is_recent(self, name: str, source: Address) -> bool:
        """Return whether the list *name* of the match ``recent`` holds *source*."""
        return False


class Walk:
    """Follows packets through chains, and notes what they meet."""

    def __init__(
        self, ruleset: Ruleset, node: NodeView,
        addresses: frozenset[Address] = frozenset(), *, bridged: Container[Address] = (),
        bound: Container[Address] = (),
    ) -> None:  # fmt: skip
        """*addresses*: of the node's interfaces. *bound*: those of an interface that the mode made.

        *bridged*: senders whose packets are on a bridge's port when they meet the rules.
        """
        self._ruleset = ruleset
        self._node = node
        self._addresses = addresses
        self._bound = bound
        self._bridged = bridged
        self.objects: Objects = {}
        self.remembered: Destination | None = None
        self.strange = ""
        """A rule that is not understood; "": none."""

    def through(self, table: str, chain: str, flight: Flight) -> list[Branch]:
        return self._rules(table, chain, self._ruleset.relevant(table, chain, flight), flight)

    def onward(self, chains: Sequence[ChainKey], flight: Flight) -> tuple[Outcome | None, bool]:
        """Follow a packet through built-in *chains*. Return a verdict, and whether it was masqueraded.

        Where rules choose by chance, the first verdict counts.
        """
        known = self._ruleset.known
        if known is None or (likeness := self._ruleset.likeness(chains, flight)) is None:
            return self._onward(chains, flight)
        key = likeness, self.is_local(flight.destination)
        if key not in known:
            met, self.objects = self.objects, {}
            known[key] = *self._onward(chains, flight), self.objects
            self.objects = met
        outcome, masqueraded, objects = known[key]
        self.objects.update(objects)
        return outcome, masqueraded

    def _onward(self, chains: Sequence[ChainKey], flight: Flight) -> tuple[Outcome | None, bool]:
        for table, chain in chains:
            for end in self.through(table, chain, flight):
                if end.outcome is not None:
                    return end.outcome, False
                last = end.flight
            flight = last
        return None, flight.masqueraded

    def is_local(self, address: Address) -> bool:
        return address in self._bound or is_own(address, self._node, self._addresses)

    @property
    def reason(self) -> str:
        """The last object that the packet met."""
        last = next(reversed(self.objects), None)
        return f"{last.where}: {last.text}" if last else ""

    def note(self, where: str, text: str) -> None:
        self.objects[_object(where, text)] = None

    def is_bridged(self, source: Address) -> bool:
        return source in self._bridged

    def set_mark(self, value: str, flight: Flight) -> int | None:
        """Ask `Ruleset.in_set`. *value*: the set's name, and the sides of the packet that are compared."""
        name, sides = value.split()
        found = self._ruleset.in_set(name, sides.split(","), flight)
        if found is not None:
            self.note(f"ipset {name}", f"holds the packet ({sides})")
        return found

    def _rules(self, table: str, chain: str, rules: Sequence[str], flight: Flight) -> list[Branch]:
        found: list[Branch] = []
        left = 1.0
        where = f"{table} {chain}"
        for number, text in enumerate(rules):
            rule = parsed(text)
            if chain in BUILT_IN_CHAINS and rule.target in TARGETS:
                continue
            if rule.strange:
                self.strange = self.strange or text
                self.note(where, f"{text}  (not understood)")
                continue
            if not rule.matches(self, flight):
                continue
            if rule.recent:
                self._remember(rule, table, flight)
                continue
            self.note(where, text)
            branches = [rule.act(self, flight)] if rule.act else self.through(table, rule.target, flight)
            leaves = rule.goto or rule.target == "RETURN"
            if rule.chance == 1 and len(branches) == 1 and branches[0].done is None and not leaves:
                flight = branches[0].flight
                continue
            factor = left * rule.chance
            for branch in branches:
                share = branch.share * factor
                if branch.done is not None or leaves:
                    found.append(branch if factor == 1 else Branch(share, branch.done, branch.flight))
                else:
                    found += [
                        rest._replace(share=share * rest.share)
                        for rest in self._rules(table, chain, rules[number + 1:], branch.flight)
                    ]
            left *= 1 - rule.chance
            if not left:
                return found
        found.append(Branch(left, None, flight))
        return found

    def _remember(self, rule: Rule, table: str, flight: Flight) -> None:
        """Note the endpoint that affinity gives the client. The walk continues as for a new client."""
        if self._ruleset.is_recent(rule.recent, flight.packet.source):
            self.note(f"list {rule.recent}", "holds the sender")
            for text in self._ruleset.rules(table, rule.target):
                self.remembered = parsed(text).endpoint or self.remembered


_object = lru_cache(maxsize=4096)(KernelObject)
"""Packets to one frontend meet the same rules, and fewer objects are less work for the garbage collector."""
_SHORT = 32
"""Rules in a chain that needs no index."""
_ONE_ADDRESS = re.compile(r"(?<!! )-d (\S+)/(?:32|128) ")
_ONE_PORT = re.compile(r"(?<!! )--dport (\d+)(?: |$)")


def _index(rules: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of rules by the only address or port that they match; "": any."""
    found: dict[str, list[int]] = {}
    for number, rule in enumerate(rules):
        if match := _ONE_ADDRESS.search(rule):
            key = match[1]
        elif match := _ONE_PORT.search(rule):
            key = f"port {match[1]}"
        else:
            key = ""
        found.setdefault(key, []).append(number)
    return found

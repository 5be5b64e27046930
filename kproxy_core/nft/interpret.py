"""The way of a packet through the rules of nf_tables, as the kernel lists them. Pure.

    ruleset -> base chains in their order -> rules -> expressions -> the places where the packet may end

Each end says what it depends on. Chains of the families ``netdev`` and ``bridge``, and of hook ``ingress``,
are named and not followed. Connection tracking is taken to be on.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from kproxy_core.nft.expressions import (
    CERTAIN,
    Around,
    BaseChain,
    Branch,
    HeldSet,
    Looked,
    Met,
    Prepared,
    Ruleset,
    Run,
    prepare,
    run,
)
from kproxy_core.nft.packet import (
    LOOPBACK,
    NO_INTERFACE,
    RTN_ANYCAST,
    RTN_BROADCAST,
    RTN_LOCAL,
    RTN_MULTICAST,
    RTN_UNICAST,
    Connection,
    Node,
    Number,
    Place,
    Route,
    Seen,
    Status,
    Tracking,
    done,
)
from kproxy_core.nft.rules import (
    NF_ACCEPT,
    NF_DROP,
    NF_QUEUE,
    NFT_BREAK,
    NFT_CONTINUE,
    NFT_GOTO,
    NFT_JUMP,
    NFT_RETURN,
    Verdict,
)
from kproxy_core.nft.xt import STOLEN, UNKNOWN

# The answer.


class Fate(enum.Enum):
    """The end of a packet's way."""

    __hash__ = object.__hash__  # Enum's is a Python function.

    DELIVERED = "delivered"
    """To this node's sockets."""
    SENT = "sent"
    """By an interface."""
    DROPPED = "dropped"
    REJECTED = "rejected"
    """The sender is told."""
    QUEUED = "queued"
    """The program that reads the queue does not let it pass."""
    ANSWERED = "answered"
    """In the place of the destination (synproxy)."""
    UNROUTABLE = "no route"
    UNKNOWN = "unknown"


class End(NamedTuple):
    """One end of a packet's ways."""

    fate: Fate
    hook: str
    place: Place | None
    """None: it has passed all rules."""
    packets: int | None
    """Packets that ended there so far; None: not counted."""
    branch: Branch
    why: str = ""
    """Why it has no route."""

    @property
    def seen(self) -> Seen:
        """The packet as it ends."""
        return self.branch.seen

    @property
    def share(self) -> float:
        """The share of such packets that end so, at most if there are `doubts`."""
        return self.branch.chance.share

    @property
    def doubts(self) -> tuple[str, ...]:
        return self.branch.chance.doubts

    @property
    def is_certain(self) -> bool:
        return self.branch.chance.is_certain


class Result(NamedTuple):
    ends: tuple[End, ...]
    """In the order of the rules. They exclude each other."""
    looked: tuple[Looked, ...]
    """The keys that rules have looked up, whether they apply or not."""
    rules: frozenset[Place]
    """Those that the packet meets, whether they apply or not."""
    unread: tuple[BaseChain, ...]
    """Chains that the packet may meet and that are not followed."""


class Limits(NamedTuple):
    """What a packet may meet. The defaults are for the chains of any program."""

    rules: int = 50_000
    """Each counts as often as it is met on another way, and ends in another one."""
    numbers: int = 4096
    """Of those that one rule draws at random. Each is followed by itself."""


OF_ANY_PROGRAM: Final = Limits()


class Program:
    """A ruleset that is prepared for many packets: each rule is read once, when a packet first meets it."""

    def __init__(self, ruleset: Ruleset, limits: Limits = OF_ANY_PROGRAM) -> None:
        self.limits = limits
        self._ruleset = ruleset
        self._rules: dict[tuple[str, str, str], list[Prepared]] = {}
        self._sets: dict[tuple[str, str, str], HeldSet | None] = {}
        self._chains: dict[tuple[str, str], list[BaseChain]] = {}

    def base_chains(self) -> Sequence[BaseChain]:
        return self._ruleset.base_chains()

    def chains_at(self, hook: str, family: str) -> list[BaseChain]:
        """Return the base chains that packets of a family meet at *hook*, in their order. Raises OSError."""
        if (found := self._chains.get((hook, family))) is None:
            # Of chains with the same priority, the last one made is the first one met.
            found = sorted(
                (chain for chain in reversed(self.base_chains())
                 if chain.hook == hook and chain.family in ("inet", family)),
                key=lambda chain: chain.priority)
            self._chains[hook, family] = found
        return found

    def prepared(
        self, family: str, table: str, chain: str, branches: Sequence[Branch]
    ) -> Iterable[Prepared]:
        """Return the rules of a chain, at least those that apply to one of *branches*. Raises OSError."""
        key = family, table, chain
        if (found := self._rules.get(key)) is None:
            found = self._rules[key] = [
                prepare(Place(*key, number, rule.handle), rule.expressions)
                for number, rule in enumerate(self._ruleset.rules(*key), 1)]
        return found

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None:
        key = family, table, name
        if key not in self._sets:
            self._sets[key] = self._ruleset.held_set(*key)
        return self._sets[key]

    def interpret(self, seen: Seen, node: Node) -> Result:
        """Return what becomes of *seen*, the first packet of a connection. Raises OSError.

        It begins where it arrives, or where the node sends it.
        """
        way = Way(self, node)
        way.run(Branch(seen, CERTAIN))
        return Result(way.ends, tuple(way.looked), frozenset(way.rules), tuple(
            each for each in self.base_chains() if each.family == "bridge" or (
                each.hook in DEVICE_HOOKS and each not in way.followed)))

    def chains_of(self, hook: str, device: str) -> list[BaseChain]:
        """Return the base chains that the packets of *device* meet at `DEVICE_HOOKS`, in their order."""
        found = [chain for chain in reversed(self.base_chains())
                 if chain.hook == hook and device in chain.devices]
        return sorted(found, key=lambda chain: chain.priority)


# Hooks.

DSTNAT, SRCNAT, CONNTRACK = -100, 100, -200
"""Priorities of the translations and of connection tracking (NF_IP_PRI_*)."""
_SOURCE_HOOKS: Final = ("input", "postrouting")
"""Hooks at which chains of type nat translate the source."""
_IS_LOCAL: Final = (RTN_LOCAL, RTN_BROADCAST, RTN_ANYCAST, RTN_MULTICAST)

DEVICE_HOOKS: Final = ("ingress", "egress")
"""Hooks of a device: before and behind those of IP."""

_LONGEST = 10_000
"""Rules that may apply to a packet on one way."""

_Filter = Callable[[BaseChain], bool]
_Step = Callable[[list[Branch]], list[Branch]]


class Way:
    """The way of packets from hook to hook.

    Base chains that it does not follow let all packets pass; those of type nat, and chains that it does not
    follow a jump to, translate as the caller of `hook` says.
    """

    def __init__(
        self, program: Program, node: Node, follows: _Filter = lambda chain: True,
        follows_jump: Callable[[str], bool] = lambda chain: True,
    ) -> None:
        self._program = program
        self.node = node
        self._ends: dict[tuple[Fate, str, Place | None, Seen], End] = {}
        self._follows = follows
        self._follows_jump = follows_jump
        self._translate: Callable[[Seen], Seen] = lambda seen: seen
        self._met = 0
        """Rules, each as often as it has ended in another way."""
        self._has_given_up = False
        self.looked: dict[Looked, None] = {}
        """The keys that rules have looked up, in their order."""
        self.rules: set[Place] = set()
        """The rules that packets have met."""
        self.followed: set[BaseChain] = set()
        """The chains at `DEVICE_HOOKS` that packets have met."""
        self._changes = 0
        """Rules that have changed packets, or that end in several ways."""

    @property
    def ends(self) -> tuple[End, ...]:
        """The ends so far, in the order of the rules."""
        return tuple(self._ends.values())

    def run(self, first: Branch) -> None:
        self.follow(self.enter(first))

    def enter(
        self, first: Branch, translate: Callable[[Seen], Seen] = lambda seen: seen
    ) -> list[Branch]:
        """Return the packets that pass the first hook, which may translate the destination. See `hook`."""
        if not first.seen.is_from_node:
            arrived = [first.of(first.seen._replace(output=NO_INTERFACE))]
            return self.hook("prerouting", self._at_device("ingress", arrived), translate)
        routed = [_leaving(branch) for branch in self._routed([first])]
        return [_leaving(branch) for branch in self.hook("output", routed, translate)]

    def follow(self, branches: Sequence[Branch]) -> None:
        """Follow packets that have passed the first hook to their ends."""
        if not branches or not branches[0].seen.is_from_node:
            self._received(branches)
            return
        looped = []
        for branch in self.hook("postrouting", branches):
            output = branch.seen.output
            to_itself, sent = _either_way(branch) if output is None else (branch, branch)
            if output is None or output == LOOPBACK:
                looped.append(to_itself.of(_looped(branch.seen)))
            if output != LOOPBACK:
                self._sent(sent)
        # They keep the route that they were sent by.
        self._deliver(self.hook("prerouting", looped))

    def _received(self, branches: Iterable[Branch]) -> None:
        local: list[Branch] = []
        onwards: list[Branch] = []
        for branch in branches:
            route = _arriving(branch.seen, self.node)
            if route is None:
                own, other = _either_way(branch)
                local.append(own)
                onwards.append(other.of(other.seen._replace(output=None)))
            elif route.type in _IS_LOCAL:
                local.append(branch)
            elif route.type == RTN_UNICAST:
                onwards.append(branch.of(branch.seen._replace(output=route.output)))
            else:
                self._end(Fate.UNROUTABLE, "prerouting", None, None, branch, route.why)
        self._deliver(local)
        for branch in self.hook("postrouting", self.hook("forward", onwards)):
            self._sent(branch)

    def _sent(self, branch: Branch) -> None:
        for passed in self._at_device("egress", [branch]):
            self._end(Fate.SENT, "postrouting", None, None, passed)

    def _at_device(self, hook: str, branches: list[Branch]) -> list[Branch]:
        """Return the packets that pass the chains of the device by which they arrive, or leave."""
        passed = []
        for branch in branches:
            device = branch.seen.input if hook == "ingress" else branch.seen.output
            if device is None or (hook == "ingress" and not self.node.has_ingress_first(device)):
                passed.append(branch)
                continue
            chains = self._program.chains_of(hook, device.name)
            self.followed.update(chains)
            passed += self._through_each(chains, [branch])
        return passed

    def _deliver(self, branches: Sequence[Branch]) -> None:
        for branch in self.hook("input", branches):
            self._end(Fate.DELIVERED, "input", None, None, branch)

    def _routed(self, branches: Iterable[Branch]) -> list[Branch]:
        """Return the packets that the node sends, each with the interface to which it is routed."""
        found = []
        for branch in branches:
            route = _route(branch.seen, self.node)
            if route is None or route.type == RTN_UNICAST:
                rerouted = None if route is None else route.output
                found.append(branch.of(branch.seen._replace(rerouted=rerouted)))
            elif route.type in _IS_LOCAL:
                found.append(branch.of(branch.seen._replace(rerouted=LOOPBACK)))
            else:
                self._end(Fate.UNROUTABLE, "output", None, None, branch, route.why)
        return found

    def _end(
        self, fate: Fate, hook: str, place: Place | None, packets: int | None, branch: Branch, why: str = "",
    ) -> None:
        end = End(fate, hook, place, packets, branch, why)
        key = fate, hook, place, branch.seen
        if (known := self._ends.get(key)) is not None:
            (end,) = (known._replace(branch=each) for each in _joined([known.branch, branch]))
        self._ends[key] = end

    def hook(
        self, hook: str, branches: Sequence[Branch], translate: Callable[[Seen], Seen] = lambda seen: seen,
    ) -> list[Branch]:
        """Return the packets that pass *hook*. *translate* is done in the place of chains not followed."""
        self._translate = translate
        if not branches:
            return []
        family = branches[0].seen.packet.family.ip
        chains = self._program.chains_at(hook, family)
        nat = [chain for chain in chains if chain.type == "nat"]
        steps: dict[int, _Step] = {
            SRCNAT if hook in _SOURCE_HOOKS else DSTNAT: partial(self._translated, hook, nat)}
        if hook in ("prerouting", "output"):
            steps[CONNTRACK] = _tracked
        current = list(branches)
        behind = [chain for chain in chains if chain.type != "nat" and self._follows(chain)]
        for priority in sorted(steps):
            current = self._through_each([each for each in behind if each.priority < priority], current)
            beside = [each for each in behind if each.priority == priority]
            behind = [each for each in behind if each.priority > priority]
            current = self._beside(steps[priority], beside, current)
        return self._through_each(behind, current)

    def _beside(self, step: _Step, chains: Sequence[BaseChain], branches: list[Branch]) -> list[Branch]:
        """Return the packets behind *step* of the kernel and *chains* of its priority, in either order."""
        if not chains:
            return step(branches)
        doubt = f"the order at priority {chains[0].priority}"
        before, after = (
            [branch._replace(chance=branch.chance.given(doubt, matched=is_first)) for branch in branches]
            for is_first in (True, False))
        return _joined([*self._through_each(chains, step(before)), *step(self._through_each(chains, after))])

    def _through_each(self, chains: Iterable[BaseChain], branches: list[Branch]) -> list[Branch]:
        for chain in chains:
            branches = self._base(chain, branches)
        return branches

    def _base(self, chain: BaseChain, branches: list[Branch]) -> list[Branch]:
        found = self._through(chain, branches) if branches else []
        if chain.type != "route" or not found:
            return found
        before = {(each.seen.mark, each.seen.packet) for each in branches}
        changed = [each for each in found if (each.seen.mark, each.seen.packet) not in before]
        same = [each for each in found if (each.seen.mark, each.seen.packet) in before]
        return [*same, *self._routed(changed)]

    def _translated(
        self, hook: str, chains: Sequence[BaseChain], branches: list[Branch],
    ) -> list[Branch]:
        """Return the packets behind the translation at *hook*: the first that a chain makes, or none."""
        bit = done(is_source=hook in _SOURCE_HOOKS)
        finished: list[Branch] = []
        current = branches
        for chain in chains:
            current = _translatable(current, bit, finished)
            if current:
                current = self._through(chain, current) if self._follows(chain) else self._as_served(current)
        rest = self._as_served(_translatable(current, bit, finished))
        passed = [branch.of(_decided(branch.seen, bit)) for branch in (*finished, *rest)]
        if hook != "output":
            return passed
        changed = [each for each in passed if _has_other_destination(each.seen)]
        return [*(each for each in passed if not _has_other_destination(each.seen)), *self._routed(changed)]

    def _as_served(self, branches: Iterable[Branch]) -> list[Branch]:
        return [branch.of(self._translate(branch.seen)) for branch in branches]

    # Chains.

    def _through(self, base: BaseChain, branches: list[Branch]) -> list[Branch]:
        """Return the packets that a base chain lets pass."""
        accepted: list[Branch] = []
        before = self._changes
        around = Around(self._program.held_set, self.node, base, self._program.limits.numbers)
        rest = self._chain(around, base.name, branches, accepted)
        if base.drops_by_policy:
            place = Place(base.family, base.table, base.name, None, 0)
            for branch in rest:
                self._end(Fate.DROPPED, base.hook, place, base.packets, branch)
            rest = []
        return self._joined_since(before, accepted, rest)

    def _joined_since(self, before: int, one: list[Branch], other: list[Branch]) -> list[Branch]:
        """Return *one* and *other*, which can have the same packets only if rules have changed some."""
        found = [*one, *other] if one and other else one or other
        return found if self._changes == before or len(found) < 2 else _joined(found)

    def _chain(
        self, around: Around, name: str, branches: list[Branch], accepted: list[Branch],
    ) -> list[Branch]:
        """Return the packets that leave a chain at its end or by "return", and add those *accepted*.

        No two of *branches* are the same packet.
        """
        base, most = around.base, self._program.limits.rules
        current = branches
        behind: list[Branch] = []
        at_first = self._changes
        for rule in self._program.prepared(base.family, base.table, name, branches):
            if not current:
                break
            self.rules.add(rule.place)
            before = self._changes
            onwards: list[Branch] = []
            leads: dict[Verdict, list[Branch]] = {}
            for branch in current:
                if self._met >= most or len(branch.met) >= _LONGEST:
                    return self._give_up(base, branch)
                ways = run(around, rule, branch)
                self._met += len(ways)
                for way in ways:
                    if way.looked:
                        self.looked.update(dict.fromkeys(way.looked))
                    verdict, after = way.verdict, way.branch
                    if len(ways) > 1 or after.seen is not branch.seen:
                        self._changes += 1
                    if verdict.code in _ONWARDS:
                        onwards.append(after)
                    elif verdict.code in _LEADS:
                        leads.setdefault(verdict, []).append(after)
                    elif verdict.code == NFT_RETURN:
                        behind.append(after)
                    else:
                        self._decide(base, rule.place, way, accepted)
            for verdict, found in leads.items():
                if not self._follows_jump(verdict.chain):
                    fallen = self._as_served(found) if base.type == "nat" else found
                    accepted += [each for each in fallen if is_translated(each.seen)]
                    fallen = [each for each in fallen if not is_translated(each.seen)]
                    self._changes += 1
                else:
                    entering = self._joined_since(before, found, [])
                    fallen = self._chain(around, verdict.chain, entering, accepted)
                (onwards if verdict.code == NFT_JUMP else behind).extend(fallen)
            current = self._joined_since(before, onwards, [])
        return self._joined_since(at_first, behind, current)

    def _give_up(self, base: BaseChain, branch: Branch) -> list[Branch]:
        """End the way of packets that meet too many rules."""
        if not self._has_given_up:
            self._has_given_up = True
            much = branch.chance.given(f"more than {self._met:,} rules", matched=True)
            place = Place(base.family, base.table, base.name, None, 0)
            self._end(Fate.UNKNOWN, base.hook, place, None, branch._replace(chance=much))
        return []

    def _decide(self, base: BaseChain, place: Place, way: Run, accepted: list[Branch]) -> None:
        """End the way of a packet by a verdict, or add it to those *accepted*."""
        branch, code = way.branch, way.verdict.code
        if code & 0xFF == NF_ACCEPT and code > 0:
            accepted.append(branch)
        elif code & 0xFF == NF_QUEUE and code > 0:
            answers = [branch._replace(chance=branch.chance.given("queue", place, matched=is_kept))
                       for is_kept in (True, False)]
            self._end(Fate.QUEUED, base.hook, place, way.packets, answers[0])
            accepted.append(answers[1])
        else:
            fate = _FATES.get(code if code < 0 else code & 0xFF, Fate.UNKNOWN)
            fate = Fate.REJECTED if way.rejects and fate is Fate.DROPPED else fate
            self._end(fate, base.hook, place, way.packets, branch)


_ONWARDS: Final = (NFT_CONTINUE, NFT_BREAK)
_LEADS: Final = (NFT_JUMP, NFT_GOTO)
_FATES: Final = {NF_DROP: Fate.DROPPED, STOLEN: Fate.ANSWERED, UNKNOWN: Fate.UNKNOWN}


def _route(seen: Seen, node: Node) -> Route | None:
    destination = seen.packet.destination
    return None if destination is None else node.route(destination, seen.mark)


def _arriving(seen: Seen, node: Node) -> Route | None:
    return _route(seen, node) if node.arriving is None else node.arriving(seen)


def _either_way(branch: Branch) -> tuple[Branch, Branch]:
    """Return a packet that is for this node, and one that is not."""
    chance = branch.chance
    return (branch._replace(chance=chance.given("the route", matched=True)),
            branch._replace(chance=chance.given("the route", matched=False)))


def _leaving(branch: Branch) -> Branch:
    """Return a packet of the node behind hook ``output``, within which its interface stays the same."""
    if branch.seen.rerouted == NO_INTERFACE:
        return branch
    return branch.of(branch.seen._replace(output=branch.seen.rerouted, rerouted=NO_INTERFACE))


def _has_other_destination(seen: Seen) -> bool:
    connection = seen.connection
    return connection is not None and connection.original.destination != connection.reply.source


def _looped(seen: Seen) -> Seen:
    """Return a packet of the node to itself as its loopback interface receives it: it is tracked already."""
    connection = seen.connection
    if connection is not None:
        connection = connection._replace(status=connection.status | Status.CONFIRMED)
    return seen._replace(input=LOOPBACK, output=NO_INTERFACE, connection=connection)


def _tracked(branches: list[Branch]) -> list[Branch]:
    found = []
    for branch in branches:
        chance = branch.chance
        if not branch.seen.packet.is_sound:  # A wrong checksum makes it invalid, if it is looked at.
            found.append(branch._replace(chance=chance.given("the checksum", matched=False)))
            chance = chance.given("the checksum", matched=True)
        found.append(Branch(track(branch.seen), chance, branch.met))
    return found


def track(seen: Seen) -> Seen:
    """Return the packet behind the hook of connection tracking."""
    if seen.tracking not in (Tracking.NOT_YET, Tracking.TEMPLATE):
        return seen
    flow = seen.packet.flow
    unclear: Number = 0 if seen.tracking is Tracking.NOT_YET else "ct template"
    connection = Connection(flow, flow.reversed(), zone=unclear, helper=unclear)
    return seen._replace(tracking=Tracking.TRACKED, connection=connection)


def _translatable(branches: Iterable[Branch], bit: Status, finished: list[Branch]) -> list[Branch]:
    """Return the packets of which the translation is not decided yet, and add the others to *finished*."""
    found: list[Branch] = []
    for branch in branches:
        connection = branch.seen.connection
        (finished if connection is None or connection.status & bit else found).append(branch)
    return found


def is_translated(seen: Seen, which: Status = Status.DST_NAT) -> bool:
    """Return whether the destination has been changed, or with SRC_NAT the source."""
    return seen.connection is not None and bool(seen.connection.status & which)


def _decided(seen: Seen, bit: Status) -> Seen:
    """Return the packet behind the translation: the kernel writes again what an earlier hook decided."""
    connection = seen.connection
    if connection is None:
        return seen
    packet, reply = seen.packet, connection.reply
    if connection.status & (Status.DST_NAT if bit is Status.DST_NAT_DONE else Status.SRC_NAT):
        flow = packet.flow
        wanted = flow._replace(destination=reply.source, port=reply.source_port) if (
            bit is Status.DST_NAT_DONE) else flow._replace(
            source=reply.destination, source_port=reply.port)
        packet = packet if wanted == flow else packet.with_flow(wanted)
    if packet is seen.packet and connection.status & bit:
        return seen
    return seen.translated(
        packet, connection.translated(reply, connection.status | bit, connection.translated_by))


def _joined(branches: Sequence[Branch]) -> list[Branch]:
    """Return *branches* with those of the same packet as one."""
    if len(branches) < 2:
        return list(branches)
    found: dict[Seen, Branch] = {}
    for branch in branches:
        known = found.get(branch.seen)
        if known is None:
            found[branch.seen] = branch
        elif branch is not known:
            found[branch.seen] = Branch(
                branch.seen, known.chance.or_else(branch.chance), _met_by_either(known.met, branch.met))
    return list(found.values())


def _met_by_either(one: tuple[Met, ...], other: tuple[Met, ...]) -> tuple[Met, ...]:
    if one == other:
        return one
    same = next((at for at, (mine, yours) in enumerate(zip(one, other, strict=False)) if mine != yours), min(
        len(one), len(other)))
    rest = [_counted(each[same:]) for each in (one, other)]
    certain = [_counted(met for met in each[same:] if met.is_certain) for each in (one, other)]
    both = certain[0] & certain[1]
    looked: dict[tuple[Place, bool], dict[Looked, None]] = {}
    for met in (*one[same:], *other[same:]):
        looked.setdefault((met.place, met.misses), {}).update(dict.fromkeys(met.looked))
    return (*one[:same], *(
        Met(key[0], number < both[key], tuple(looked[key]))
        for key, count in (rest[0] | rest[1]).items() for number in range(count)))


def _counted(met: Iterable[Met]) -> Counter[tuple[Place, bool]]:
    return Counter((each.place, each.misses) for each in met)

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
    HOOKS,
    BaseChain,
    Branch,
    Looked,
    Met,
    Ran,
    Rule,
    Ruleset,
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
    unread: tuple[BaseChain, ...]
    """Chains that the packet may meet and that are not followed."""


def interpret(ruleset: Ruleset, seen: Seen, node: Node) -> Result:
    """Return what becomes of *seen*, the first packet of a connection. Raises OSError.

    It begins where it arrives, or where the node sends it.
    """
    way = Way(ruleset, node)
    way.run(Branch(seen, CERTAIN))
    family = seen.packet.family.ip
    return Result(way.ends, tuple(
        each for each in ruleset.base_chains() if each.family in ("netdev", "bridge") or (
            each.family in ("inet", family) and each.hook not in HOOKS)))


# Hooks.

DSTNAT, SRCNAT, CONNTRACK = -100, 100, -200
"""Priorities of the translations and of connection tracking (NF_IP_PRI_*)."""
_SOURCE_HOOKS: Final = ("input", "postrouting")
"""Hooks at which chains of type nat translate the source."""
_IS_LOCAL: Final = (RTN_LOCAL, RTN_BROADCAST, RTN_ANYCAST, RTN_MULTICAST)

_MOST_RULES = 50_000
"""Rules that one packet may meet: chains may be reached on many ways."""

_Filter = Callable[[BaseChain], bool]
_Step = Callable[[list[Branch]], list[Branch]]


class Way:
    """The way of packets from hook to hook.

    Base chains that it does not follow let all packets pass; those of type nat, and chains that it does not
    follow a jump to, translate as the caller of `hook` says.
    """

    def __init__(
        self, ruleset: Ruleset, node: Node, follows: _Filter = lambda chain: True,
        follows_jump: Callable[[str], bool] = lambda chain: True,
    ) -> None:
        self.ruleset = ruleset
        self.node = node
        self._ends: dict[tuple[Fate, str, Place | None, Seen], End] = {}
        self._follows = follows
        self._follows_jump = follows_jump
        self._translate: Callable[[Seen], Seen] = lambda seen: seen
        self._met = 0

    @property
    def ends(self) -> tuple[End, ...]:
        """The ends so far, in the order of the rules."""
        return tuple(self._ends.values())

    def run(self, first: Branch) -> None:
        self.follow(self.enter(first))

    def enter(self, first: Branch) -> list[Branch]:
        """Return the packets that pass the first hook, which may translate the destination."""
        if not first.seen.is_from_node:
            return self.hook("prerouting", [first._replace(seen=first.seen._replace(output=NO_INTERFACE))])
        routed = [_leaving(branch) for branch in self._routed([first])]
        return [_leaving(branch) for branch in self.hook("output", routed)]

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
                looped.append(to_itself._replace(seen=_looped(branch.seen)))
            if output != LOOPBACK:
                self._end(Fate.SENT, "postrouting", None, None, sent)
        # They keep the route that they were sent by.
        self._deliver(self.hook("prerouting", looped))

    def _received(self, branches: Iterable[Branch]) -> None:
        local: list[Branch] = []
        onwards: list[Branch] = []
        for branch in branches:
            route = _route(branch.seen, self.node)
            if route is None:
                own, other = _either_way(branch)
                local.append(own)
                onwards.append(other._replace(seen=other.seen._replace(output=None)))
            elif route.type in _IS_LOCAL:
                local.append(branch)
            elif route.type == RTN_UNICAST:
                onwards.append(branch._replace(seen=branch.seen._replace(output=route.output)))
            else:
                self._end(Fate.UNROUTABLE, "prerouting", None, None, branch)
        self._deliver(local)
        for branch in self.hook("postrouting", self.hook("forward", onwards)):
            self._end(Fate.SENT, "postrouting", None, None, branch)

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
                found.append(branch._replace(seen=branch.seen._replace(rerouted=rerouted)))
            elif route.type in _IS_LOCAL:
                found.append(branch._replace(seen=branch.seen._replace(rerouted=LOOPBACK)))
            else:
                self._end(Fate.UNROUTABLE, "output", None, None, branch)
        return found

    def _end(
        self, fate: Fate, hook: str, place: Place | None, packets: int | None, branch: Branch,
    ) -> None:
        end = End(fate, hook, place, packets, branch)
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
        # Of chains with the same priority, the last one made is the first one met.
        chains = [
            chain for chain in reversed(self.ruleset.base_chains())
            if chain.hook == hook and chain.family in ("inet", family)]
        chains.sort(key=lambda chain: chain.priority)
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
        if chain.type != "route":
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
            finished += [each for each in current if not _may_be_translated(each.seen, bit)]
            current = [each for each in current if _may_be_translated(each.seen, bit)]
            if current:
                current = self._through(chain, current) if self._follows(chain) else self._as_served(current)
        finished += [each for each in current if not _may_be_translated(each.seen, bit)]
        rest = self._as_served([each for each in current if _may_be_translated(each.seen, bit)])
        passed = [
            branch if (seen := _decided(branch.seen, bit)) is branch.seen else branch._replace(seen=seen)
            for branch in (*finished, *rest)]
        if hook != "output":
            return passed
        changed = [each for each in passed if _has_other_destination(each.seen)]
        return [*(each for each in passed if not _has_other_destination(each.seen)), *self._routed(changed)]

    def _as_served(self, branches: Iterable[Branch]) -> list[Branch]:
        return [branch._replace(seen=self._translate(branch.seen)) for branch in branches]

    # Chains.

    def _through(self, base: BaseChain, branches: list[Branch]) -> list[Branch]:
        """Return the packets that a base chain lets pass."""
        accepted: list[Branch] = []
        rest = self._chain(base, base.name, branches, accepted)
        if base.drops_by_policy:
            place = Place(base.family, base.table, base.name, None, 0)
            for branch in rest:
                self._end(Fate.DROPPED, base.hook, place, base.packets, branch)
            rest = []
        return _joined([*accepted, *rest])

    def _chain(
        self, base: BaseChain, name: str, branches: Sequence[Branch], accepted: list[Branch],
    ) -> list[Branch]:
        """Return the packets that leave a chain at its end or by "return", and add those *accepted*."""
        current = list(branches)
        behind: list[Branch] = []
        for place, rule in self.rules(base, name, branches):
            if not current:
                break
            onwards: list[Branch] = []
            leads: dict[Verdict, list[Branch]] = {}
            for branch in current:
                self._met += 1
                if self._met > _MOST_RULES:
                    return self._give_up(base, branch)
                for verdict, ran in run(self.ruleset, self.node, base, place, rule, branch):
                    self._apply(base, place, verdict, ran, onwards, behind, accepted, leads)
            for verdict, found in leads.items():
                if not self._follows_jump(verdict.chain):
                    fallen = self._as_served(found) if base.type == "nat" else found
                    accepted += [each for each in fallen if is_translated(each.seen)]
                    fallen = [each for each in fallen if not is_translated(each.seen)]
                else:
                    fallen = self._chain(base, verdict.chain, _joined(found), accepted)
                (onwards if verdict.code == NFT_JUMP else behind).extend(fallen)
            current = onwards if len(onwards) < 2 else _joined(onwards)
        return _joined([*behind, *current])

    def rules(
        self, base: BaseChain, name: str, branches: Sequence[Branch]
    ) -> Iterable[tuple[Place, Rule]]:
        """Yield the rules of a chain, at least those that match one of *branches*."""
        for number, rule in enumerate(self.ruleset.rules(base.family, base.table, name), 1):
            yield Place(base.family, base.table, name, number, rule.handle), rule

    def _give_up(self, base: BaseChain, branch: Branch) -> list[Branch]:
        """End the way of packets that meet too many rules."""
        if self._met == _MOST_RULES + 1:
            much = branch.chance.given(f"more than {_MOST_RULES:,} rules", matched=True)
            place = Place(base.family, base.table, base.name, None, 0)
            self._end(Fate.UNKNOWN, base.hook, place, None, branch._replace(chance=much))
        return []

    def _apply(
        self, base: BaseChain, place: Place, verdict: Verdict, ran: Ran, onwards: list[Branch],
        behind: list[Branch], accepted: list[Branch], leads: dict[Verdict, list[Branch]],
    ) -> None:
        branch, code = ran.branch, verdict.code
        if code in (NFT_CONTINUE, NFT_BREAK):
            onwards.append(branch)
        elif code in (NFT_JUMP, NFT_GOTO):
            leads.setdefault(verdict, []).append(branch)
        elif code == NFT_RETURN:
            behind.append(branch)
        elif code & 0xFF == NF_ACCEPT and code > 0:
            accepted.append(branch)
        elif code & 0xFF == NF_QUEUE and code > 0:
            answers = [branch._replace(chance=branch.chance.given("queue", place, matched=is_kept))
                       for is_kept in (True, False)]
            self._end(Fate.QUEUED, base.hook, place, ran.packets, answers[0])
            accepted.append(answers[1])
        else:
            fate = _FATES.get(code if code < 0 else code & 0xFF, Fate.UNKNOWN)
            fate = Fate.REJECTED if ran.rejects and fate is Fate.DROPPED else fate
            self._end(fate, base.hook, place, ran.packets, branch)


_FATES: Final = {NF_DROP: Fate.DROPPED, STOLEN: Fate.ANSWERED, UNKNOWN: Fate.UNKNOWN}


def _route(seen: Seen, node: Node) -> Route | None:
    destination = seen.packet.flow.destination
    return None if destination is None else node.route(destination, seen.mark)


def _either_way(branch: Branch) -> tuple[Branch, Branch]:
    """Return a packet that is for this node, and one that is not."""
    chance = branch.chance
    return (branch._replace(chance=chance.given("the route", matched=True)),
            branch._replace(chance=chance.given("the route", matched=False)))


def _leaving(branch: Branch) -> Branch:
    """Return a packet of the node behind hook ``output``, within which its interface stays the same."""
    if branch.seen.rerouted == NO_INTERFACE:
        return branch
    return branch._replace(
        seen=branch.seen._replace(output=branch.seen.rerouted, rerouted=NO_INTERFACE))


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
        found.append(branch._replace(seen=track(branch.seen), chance=chance))
    return found


def track(seen: Seen) -> Seen:
    """Return the packet behind the hook of connection tracking."""
    if seen.tracking not in (Tracking.NOT_YET, Tracking.TEMPLATE):
        return seen
    flow = seen.packet.flow
    unclear: Number = 0 if seen.tracking is Tracking.NOT_YET else "ct template"
    connection = Connection(flow, flow.reversed(), zone=unclear, helper=unclear)
    return seen._replace(tracking=Tracking.TRACKED, connection=connection)


def _may_be_translated(seen: Seen, bit: Status) -> bool:
    return seen.connection is not None and not seen.connection.status & bit


def is_translated(seen: Seen, which: Status = Status.DST_NAT) -> bool:
    """Return whether the destination has been changed, or with SRC_NAT the source."""
    return seen.connection is not None and bool(seen.connection.status & which)


def _decided(seen: Seen, bit: Status) -> Seen:
    """Return the packet behind the translation: the kernel writes again what an earlier hook decided."""
    connection = seen.connection
    if connection is None:
        return seen
    flow, reply = seen.packet.flow, connection.reply
    if bit is Status.DST_NAT_DONE and connection.status & Status.DST_NAT:
        flow = flow._replace(destination=reply.source, port=reply.source_port)
    if bit is Status.SRC_NAT_DONE and connection.status & Status.SRC_NAT:
        flow = flow._replace(source=reply.destination, source_port=reply.port)
    if flow == seen.packet.flow and connection.status & bit:
        return seen
    packet = seen.packet if flow == seen.packet.flow else seen.packet.with_flow(flow)
    return seen._replace(packet=packet, connection=connection._replace(status=connection.status | bit))


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

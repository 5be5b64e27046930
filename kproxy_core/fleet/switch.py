"""The switch of many nodes: which move, which is next, when to stop, and what to do then. Pure."""

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

# One node: how well it is, and what has become of it.


class Condition(Struct, frozen=True, kw_only=True):
    """How well a node is."""

    problems: tuple[str, ...] = ()
    """Those of `kproxy status`."""
    failures: Mapping[str, str] | None = None
    """Problems of connections by frontend, as found by `kproxy verify`; None: not tried, or unclear."""
    unclear: str = ""
    """The reason why connections tell nothing."""


def worse(before: Condition, after: Condition) -> tuple[str, ...]:
    """Return in what a node is worse *after* than *before*.

    A frontend that failed before may fail after, and what had a problem may have another one.
    """
    had = set(map(_subject, before.problems))
    found = [problem for problem in after.problems if _subject(problem) not in had]
    if before.failures is not None and after.failures is None:
        found.append(after.unclear)
    known = before.failures or {}
    found += [f"{frontend}: {problem}" for frontend, problem in (after.failures or {}).items()
              if frontend not in known]  # fmt: skip
    return tuple(found)


def _subject(problem: str) -> str:
    """Return what has a *problem*, such as ``IPv4`` or ``Service shop/web``."""
    return problem.partition(":")[0]


def lasting(first: Condition, second: Condition) -> Condition:
    """Return *second* without the failures that *first* did not have: such as those of a pod that ended."""
    if first.failures is None or second.failures is None:
        return second
    return replace(second, failures={
        frontend: problem for frontend, problem in second.failures.items() if frontend in first.failures})


class State(enum.Enum):
    """What has become of a node."""

    THERE = "there"
    """It served in the mode already."""
    WAITING = "waiting"
    UNDER_WAY = "under way"
    MOVED = "moved"
    WORSE = "worse"
    """It serves in the new mode, and worse than before."""
    REFUSED = "refused"
    """It serves as before."""
    LOST = "lost"
    """The connection to it was lost, and it could not be asked any more."""
    UNREACHED = "unreached"
    """It could not be asked before anything began."""


FAILED = frozenset({State.WORSE, State.REFUSED, State.LOST})
"""States after which no other node is begun."""


class Found(Struct, frozen=True, kw_only=True):
    """A node before the switch, as `kproxy status` tells."""

    node: str
    mode: str = ""
    """The mode that serves."""
    before: str = ""
    """The one that served before the last switch; "": none."""
    configured: str = ""
    """The one in the configuration; "": none."""
    label: str = ""
    """The key of the Node's label that names the one that serves; "": none does."""
    problems: tuple[str, ...] = ()
    unreached: str = ""
    """The reason why it could not be asked."""


class Move(Struct, frozen=True, kw_only=True):
    """A node of a rollout."""

    name: str
    serves: str
    """The mode at the start; "": not known."""
    goal: str
    configured: str = ""
    """The mode in its configuration; "": none."""
    label: str = ""
    """The key of the Node's label that names the mode at the start; "": none did."""
    state: State = State.WAITING
    reasons: tuple[str, ...] = ()
    """Why it failed, or is not well."""

    @property
    def is_there_and_well(self) -> bool:
        return self.state in (State.THERE, State.MOVED) and not self.reasons


def to_move(found: Found, mode: str) -> Move:
    """Return the node on its way to *mode*."""
    state = State.THERE if found.mode == mode else State.WAITING
    return _move(found, mode, state)


def to_move_back(found: Found, mode: str) -> Move:
    """Return the node on its way from *mode* to the one that served before.

    One that does not serve in *mode*, or was not switched to it, stays.
    """
    if found.mode == mode and found.before:
        return _move(found, found.before, State.WAITING)
    return _move(found, found.mode, State.THERE)


def _move(found: Found, goal: str, state: State) -> Move:
    if found.unreached:
        return Move(name=found.node, serves="", goal=goal, state=State.UNREACHED, reasons=(found.unreached,))
    return Move(name=found.node, serves=found.mode, goal=goal, configured=found.configured, label=found.label,
                state=state, reasons=found.problems)


# All nodes.


class Rollout(Struct, frozen=True, kw_only=True):
    """The nodes, and how far each is."""

    moves: tuple[Move, ...]
    at_a_time: int
    """Most nodes under way."""
    is_interrupted: bool = False
    """The operator wants no further node to begin."""

    def following(self) -> tuple[Move, ...]:
        """Return the nodes to begin now."""
        if self.is_stopped:
            return ()
        free = self.at_a_time - len(self.of(State.UNDER_WAY))
        return self.of(State.WAITING)[:max(0, free)]

    def begin(self, name: str) -> "Rollout":
        return self._with(name, State.UNDER_WAY, ())

    def end(self, name: str, state: State, reasons: Sequence[str] = ()) -> "Rollout":
        """Note what has become of a node; *reasons*: why it failed, or is not well."""
        return self._with(name, state, tuple(reasons))

    def interrupt(self) -> "Rollout":
        return replace(self, is_interrupted=True)

    def _with(self, name: str, state: State, reasons: tuple[str, ...]) -> "Rollout":
        moves = [replace(move, state=state, reasons=reasons) if move.name == name else move
                 for move in self.moves]
        return replace(self, moves=tuple(moves))

    def move(self, name: str) -> Move:
        return next(move for move in self.moves if move.name == name)

    def of(self, *states: State) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.state in states)

    @property
    def is_stopped(self) -> bool:
        """Whether no further node may begin."""
        return self.is_interrupted or bool(self.of(*FAILED))

    @property
    def is_over(self) -> bool:
        return not self.of(State.UNDER_WAY) and not self.following()

    @property
    def is_well(self) -> bool:
        """Whether all nodes are there, and well."""
        return all(move.is_there_and_well for move in self.moves)


# What the operator does then.


class Advice(NamedTuple):
    """A command, and what it is for."""

    purpose: str
    command: str


def advice(rollout: Rollout, go_on: str, go_back: str) -> tuple[Advice, ...]:
    """Return what to do after the end of *rollout*, with the commands *go_on* and *go_back* (or "")."""
    found = []
    if rollout.of(State.WAITING, State.REFUSED, State.LOST, State.UNREACHED):
        found.append(Advice("to go on", go_on))
    if go_back and rollout.is_stopped and rollout.of(State.MOVED, State.WORSE, State.LOST):
        found.append(Advice("to go back", go_back))
    return tuple(found)


class Differing(NamedTuple):
    """Nodes that serve in another mode than their configuration names, until they reboot."""

    configured: str
    serving: str
    nodes: tuple[str, ...]


def configurations(rollout: Rollout) -> Iterator[Differing]:
    """Yield the nodes that a reboot would bring back to another mode, by both modes.

    A node whose label names its mode is not among them.
    """
    differing: dict[tuple[str, str], list[str]] = {}
    for move in rollout.moves:
        serves_goal = move.state in (State.THERE, State.MOVED, State.WORSE)
        if serves_goal and move.configured != move.goal and not move.label:
            differing.setdefault((move.configured, move.goal), []).append(move.name)
    for modes, names in differing.items():
        yield Differing(*modes, tuple(names))

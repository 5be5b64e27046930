"""``kubectl kproxy switch``: another mode for the proxies of many nodes, a few at a time."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kproxy_core.cli.kubectl.options import NODES, with_cluster
from kproxy_core.cli.kubectl.tables import asked, selected
from kproxy_core.cli.options import OUTPUT, FlagCommand, complete_mode
from kproxy_core.cli.terminal import bad, encoded_event, faint, good, hint, show

if TYPE_CHECKING:
    from types import FrameType

    from kproxy_core.fleet.cluster import Cluster, Node
    from kproxy_core.fleet.switch import Differing, Move, Rollout, State

_SHOWN = 5
"""Most reasons of a node, or names of nodes, in a text."""
_OFTEN = 1.0
"""Seconds after which the main thread looks for a signal that arrived just before it fell asleep."""

# What would be lost.


def check(cluster: Cluster, nodes: Sequence[Node], mode: str, output: str) -> bool:
    """Print what each node would lose with *mode*. Return whether none would, and none refuses."""
    from kproxy_core.fleet.node_switch import Check, checking

    would_do = True
    for node, found in sorted(asked(cluster, nodes, checking(mode), Check), key=lambda each: each[0].name):
        serves = problem = ""
        losses: tuple[str, ...] = ()
        if isinstance(found, Exception):
            problem = found.why
        else:
            serves, losses = found.mode, found.losses
        would_do = would_do and not losses and not problem
        if output != "text":
            _print_event(output, "check", node=node.name, serves=serves, losses=losses, problem=problem)
            continue
        for loss in losses:
            show(f"{node.name}: {bad('lost')}: {loss}")
        if problem:
            show(f"{node.name}: {bad('cannot be switched')}: {problem}")
        elif not losses:
            show(f"{node.name}: {good(f'{mode} already serves' if serves == mode else 'nothing is lost')}")
    if output != "text":
        _print_event(output, "summary", well=would_do)
    return would_do


# The rollout.


def survey(
    cluster: Cluster, nodes: Sequence[Node], mode: str, *, at_a_time: int, undo: bool
) -> Rollout:
    """Ask each node what it serves. Return the rollout to *mode*, or back from it."""
    from kproxy_core.app.replies import ProxyStatus
    from kproxy_core.fleet.node_switch import STATUS
    from kproxy_core.fleet.switch import Found, Rollout, to_move, to_move_back

    moves: list[Move] = []
    for node, status in asked(cluster, nodes, STATUS, ProxyStatus):
        if isinstance(status, Exception):
            found = Found(node=node.name, unreached=status.why)
        else:
            found = Found(node=node.name, mode=status.mode, before=status.before,
                          configured=status.configured, label=status.label,
                          problems=tuple(status.problems))
        moves.append(to_move_back(found, mode) if undo else to_move(found, mode))
    return Rollout(moves=tuple(sorted(moves, key=lambda move: move.name)), at_a_time=at_a_time)


class _Stepped(NamedTuple):
    node: str
    step: str


class _Ended(NamedTuple):
    node: str
    state: State
    reasons: tuple[str, ...]


class _Interrupted:
    pass


_Events = SimpleQueue[_Stepped | _Ended | _Interrupted]


def carry_out(
    rollout: Rollout, cluster: Cluster, nodes: Sequence[Node], printer: Printer, *, accept_losses: bool
) -> Rollout:
    """Move the nodes, each by a thread of its own. Return what has become of them.

    After an interrupt no further node begins. A second one raises KeyboardInterrupt: switches under way
    end on their nodes.
    """
    events: _Events = SimpleQueue()
    known = {node.name: node for node in nodes}
    with _interrupts(events):
        while not rollout.is_over:
            for move in rollout.following():
                rollout = rollout.begin(move.name)
                printer.began(move)
                threading.Thread(
                    target=_switch, args=(cluster, known[move.name], move.goal, accept_losses, events),
                    daemon=True).start()
            event = _next(events)
            if isinstance(event, _Stepped):
                printer.stepped(*event)
            elif isinstance(event, _Ended):
                rollout = rollout.end(*event)
                printer.ended(rollout.move(event.node))
            else:
                rollout = rollout.interrupt()
                printer.interrupted(rollout)
    return rollout


def _switch(cluster: Cluster, node: Node, goal: str, accept_losses: bool, events: _Events) -> None:
    from kproxy_core.fleet.node_switch import NodeSwitch
    from kproxy_core.fleet.switch import State

    try:
        state, reasons = NodeSwitch(
            cluster, node, lambda step: events.put(_Stepped(node.name, step)),
            accepts_losses=accept_losses).run(goal)
    except Exception as error:
        events.put(_Ended(node.name, State.LOST, (repr(error),)))
        raise
    events.put(_Ended(node.name, state, reasons))


def _next(events: _Events) -> _Stepped | _Ended | _Interrupted:
    while True:
        with suppress(Empty):
            return events.get(timeout=_OFTEN)


@contextmanager
def _interrupts(events: _Events) -> Iterator[None]:
    """Turn the first SIGINT into an event; the next one raises KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        events.put(_Interrupted())  # A SimpleQueue may be used from handlers.

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# What is printed: each event as a line of JSON, or as text.


class Printer:
    """Prints the rollout as it goes on."""

    def __init__(self, output: str, *, go_on: str, go_back: str) -> None:
        """*go_on* and *go_back* are the commands for that; "": there is no way back."""
        self._output = output
        self._go_on = go_on
        self._go_back = go_back
        self._width = 0

    def planned(self, rollout: Rollout) -> None:
        from kproxy_core.fleet.switch import State

        self._width = max(len(move.name) for move in rollout.moves)
        if self._output != "text":
            _print_event(self._output, "plan", at_a_time=rollout.at_a_time,
                         nodes=[_document(move) for move in rollout.moves])
            return
        for move in rollout.of(State.THERE):
            self._line(move.name, f"{move.serves} already serves{_well(move)}")
        for move in rollout.of(State.UNREACHED):
            self._line(move.name, bad(f"left out: {_some(move.reasons)}"))
        ways: dict[str, list[Move]] = {}
        for move in rollout.of(State.WAITING):
            ways.setdefault(f"from {move.serves} to {move.goal}", []).append(move)
            if move.reasons:
                self._line(move.name, f"{move.serves} serves{_well(move)}")
        for way, moves in ways.items():
            show(f"{way}: {_names(moves)}")

    def began(self, move: Move) -> None:
        if self._output != "text":
            _print_event(self._output, "begin", node=move.name, serves=move.serves, goal=move.goal)
        else:
            self._line(move.name, f"from {move.serves} to {move.goal}")

    def stepped(self, node: str, step: str) -> None:
        if self._output != "text":
            _print_event(self._output, "step", node=node, step=step)
        else:
            self._line(node, bad(step) if step.startswith("rolling back") else faint(step))

    def ended(self, move: Move) -> None:
        from kproxy_core.fleet.switch import FAILED

        if self._output != "text":
            _print_event(self._output, "end", node=move.name, state=move.state.value, reasons=move.reasons)
        elif move.state in FAILED:
            self._line(move.name, f"{bad(move.state.value)}: {_some(move.reasons)}")
        else:
            self._line(move.name, f"{good(move.state.value)}{_well(move)}")

    def interrupted(self, rollout: Rollout) -> None:
        from kproxy_core.fleet.switch import State

        if self._output != "text":
            _print_event(self._output, "interrupt")
        elif under_way := rollout.of(State.UNDER_WAY):
            show(hint(f"no further node begins; waiting for {_names(under_way)}. Ctrl-C again leaves now"))

    def summary(self, rollout: Rollout) -> None:
        from kproxy_core.fleet.switch import State, advice, configurations

        after = advice(rollout, self._go_on, self._go_back)
        differing = list(configurations(rollout))
        if self._output != "text":
            _print_event(
                self._output, "summary", well=rollout.is_well, interrupted=rollout.is_interrupted,
                nodes=[_document(move) for move in rollout.moves], advice=[one._asdict() for one in after],
                configurations=[one._asdict() for one in differing])
            return
        show("")
        counts = ", ".join(f"{len(moves)} {state.value}" for state in State if (moves := rollout.of(state)))
        show(good(counts) if rollout.is_well else bad(counts))
        for move in rollout.moves:
            if move.reasons and move.state is not State.WAITING:
                self._line(move.name, f"{move.state.value}: {_some(move.reasons)}")
        for one in after:
            show(f"{one.purpose}: {one.command}")
        for each in differing:
            show(_lasting(each))

    def _line(self, node: str, text: str) -> None:
        show(f"{node:{self._width}}  {text}")


def _print_event(output: str, name: str, **fields: Any) -> None:
    click.echo(encoded_event({"event": name, **fields}, output))


def _document(move: Move) -> Mapping[str, Any]:
    return {"node": move.name, "serves": move.serves, "goal": move.goal, "configured": move.configured,
            "state": move.state.value, "reasons": move.reasons}  # fmt: skip


def _lasting(differing: Differing) -> str:
    named = f"mode {differing.configured!r}" if differing.configured else "no mode"
    return (f"the configuration has {named}: set {differing.serving!r} in the DaemonSet's ConfigMap to keep"
            f" it after a reboot of {_some(differing.nodes, ', ')}")


def _well(move: Move) -> str:
    return f", with problems: {_some(move.reasons)}" if move.reasons else ""


def _names(moves: Sequence[Move]) -> str:
    return _some([move.name for move in moves], ", ")


def _some(texts: Sequence[str], separator: str = "; ") -> str:
    more = len(texts) - _SHOWN
    return separator.join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _commands(context: click.Context) -> tuple[str, str]:
    """Return the commands to go on, and to go back; "": there is no way back from an `--undo`."""
    words = ["kubectl", "kproxy", "switch", context.params["mode"]]
    for option in context.command.params:
        value = context.params.get(str(option.name))
        if isinstance(option, click.Option) and value != option.default and not option.is_flag:
            words += [option.opts[0], str(value)]
    undo = [*words, "--undo"]
    if context.params["undo"]:
        return shlex.join(undo), ""
    return shlex.join(words + ["--accept-losses"] * context.params["accept_losses"]), shlex.join(undo)


@click.command("switch", cls=FlagCommand)
@click.argument("mode", shell_complete=complete_mode)
@NODES
@click.option("--at-a-time", metavar="N", type=click.IntRange(1), default=1, show_default=True,
              help="Maximum number of nodes under way.")
@click.option("--check", "only_check", is_flag=True,
              help="Only show what would be lost on which nodes.")
@click.option("--accept-losses", is_flag=True,
              help="Also switch nodes that would lose what --check shows.")
@click.option("--undo", is_flag=True,
              help="Go back from MODE: each node to the mode that served before, with its losses.")
@click.option("--yes", is_flag=True, help="Do not ask. Required without a terminal.")
@with_cluster
@OUTPUT
@click.pass_context
def command(
    context: click.Context, cluster: Cluster, mode: str, nodes: str, at_a_time: int, only_check: bool,
    accept_losses: bool, undo: bool, yes: bool, output: str,
) -> int:
    """Switch the proxies of many nodes to another mode; connections stay open.

    Each node is checked, switched with proof, and compared with before: its connections to every Service, and
    its health. Nodes that serve in MODE already are left alone, so the same command goes on where one
    stopped. It stops at the first node that refuses or is worse than before; nodes under way end first, also
    after Ctrl-C.

    Exit status: 0 if all nodes serve in MODE and are well, else 1. With --check: 0 if nothing would be lost.
    """
    from kproxy_core.fleet.switch import State

    if only_check and undo:
        raise click.UsageError("--check and --undo exclude each other")
    if not (only_check or yes or sys.stdin.isatty()):
        raise click.UsageError("--yes is required without a terminal")
    targets = selected(cluster, nodes)
    if only_check:
        return 0 if check(cluster, targets, mode, output) else 1
    go_on, go_back = _commands(context)
    printer = Printer(output, go_on=go_on, go_back=go_back)
    rollout = survey(cluster, targets, mode, at_a_time=at_a_time, undo=undo)
    printer.planned(rollout)
    if (count := len(rollout.of(State.WAITING))) and not yes:
        click.confirm(f"Switch {count} of {len(targets)} nodes, {at_a_time} at a time?", abort=True, err=True)
    try:
        rollout = carry_out(rollout, cluster, targets, printer, accept_losses=accept_losses or undo)
    except KeyboardInterrupt:
        click.echo("switches under way end on their nodes; the same command goes on", err=True)
        raise
    printer.summary(rollout)
    return 0 if rollout.is_well else 1

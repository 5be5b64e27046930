"""The JSON that kproxy's commands print on the nodes, decoded and checked: a node may send anything."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from kproxy_core import __version__
from kproxy_core.fleet.cluster import Node, Reply
from kproxy_core.fleet.errors import Unreached
from kproxy_core.observe.logs import printable, printable_json

T = TypeVar("T")

_SHOWN = 100
"""Characters of a strange answer that are shown."""


class Status(Struct, frozen=True):
    """The answer of ``kproxy status -o json``. Times are in seconds since the epoch, by the node's clock."""

    mode: str
    configured: str
    version: str
    well: bool
    since: float
    now: float
    problems: Sequence[str]
    lag: float
    foreign_changes: int
    commit: str = ""
    fallback: str = ""
    last_sync: float | None = None
    findings: Sequence[str] = field(default_factory=tuple)


def decode(node: Node, reply: Reply, kind: type[T]) -> T:
    """Return the JSON that a command of kproxy printed on *node* as a *kind*, with printable texts.

    Raises Unreached with the command's complaint, or with what is strange about its answer.
    """
    if not reply.stdout.strip():
        raise Unreached(node.name, _complaint(reply))
    try:
        return msgspec.convert(printable_json(msgspec.json.decode(reply.stdout)), kind)
    except msgspec.ValidationError as error:
        why = f"its kproxy answers as another version than this one, {__version__}: {error}"
        raise Unreached(node.name, why) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        text = printable(reply.stdout[:_SHOWN].decode(errors="replace"))
        raise Unreached(node.name, f"its answer is not JSON: {text!r}") from error


def _complaint(reply: Reply) -> str:
    """Return why a command printed nothing."""
    last = (reply.stderr.strip().splitlines() or [f"no answer, exit status {reply.status}"])[-1]
    last = last.removeprefix("Error: ")
    if last.startswith(("No such command", "No such option")):
        return f"its kproxy is older than this one, {__version__}: {last}"
    return last[:300]

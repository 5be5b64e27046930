"""The JSON that kproxy's commands print on the nodes, decoded and checked: a node may send anything."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct

from kproxy_core import __version__
from kproxy_core.fleet.errors import Unreached
from kproxy_core.observe.logs import printable, printable_json

if TYPE_CHECKING:
    from kproxy_core.fleet.cluster import Node, Reply

T = TypeVar("T")

_SHOWN = 100
"""Characters of a strange answer that are shown."""


class Difference(Struct, frozen=True):
    kind: str
    frontend: str
    service_port: str
    difference: str


class Diff(Struct, frozen=True):
    """The answer of ``kproxy diff -o json``."""

    mode: str
    differences: Sequence[Difference]


class Traffic(Struct, frozen=True):
    """A service port in the answer of ``kproxy top``."""

    service_port: str
    protocol: str
    endpoint_count: int
    forwarded: int
    rejected: int
    failed: int
    rate: float
    bytes_to_endpoint: int
    bytes_from_endpoint: int
    problems: Sequence[str]


class Top(Struct, frozen=True):
    """The answer of ``kproxy top --once -o json``."""

    services: Sequence[Traffic]
    found: int
    counted: bool


class Frontend(Struct, frozen=True):
    frontend: str
    service_port: str
    problems: Sequence[str]


class Verified(Struct, frozen=True):
    """The answer of ``kproxy verify --traffic -o json``."""

    frontends: Sequence[Frontend]


def decode(node: "Node", reply: "Reply", kind: type[T]) -> T:
    """Return the JSON that a command of kproxy printed on *node* as a *kind*, with printable texts.

    Raises Unreached with the command's complaint, or with what is strange about its answer.
    """
    if not reply.stdout.strip():
        raise Unreached(node.name, complaint(reply))
    try:
        return msgspec.convert(printable_json(msgspec.json.decode(reply.stdout)), kind)
    except msgspec.ValidationError as error:
        why = f"its kproxy answers as another version than this one, {__version__}: {error}"
        raise Unreached(node.name, why) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        text = printable(reply.stdout[:_SHOWN].decode(errors="replace").strip())
        raise Unreached(node.name, f"its answer is not JSON: {text}") from error


def complaint(reply: "Reply") -> str:
    """Return why a command failed."""
    last = (reply.stderr.strip().splitlines() or [f"no answer, exit status {reply.status}"])[-1]
    last = last.removeprefix("Error: ")
    if last.startswith(("No such command", "No such option")):
        return f"its kproxy is older than this one, {__version__}: {last}"
    return last[:300]

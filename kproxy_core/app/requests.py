"""The requests to a running proxy as typed values, one for each command that asks it.

On the wire, a request is a JSON object whose ``do`` names it. Unknown fields are ignored, so that a command
may be newer than the proxy.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from msgspec import Meta, Struct, ValidationError, convert, field

from kproxy_core import __version__
from kproxy_core.app.errors import Misused, RequestRefused

Answer = Mapping[str, Any]
"""The fields of an answer, as JSON has them."""

Sort = Literal["name", "connections", "rate", "rejected", "failed", "bytes"]

MOST_SERVICE_PORTS = 500
"""Most service ports in an answer to `Top`."""


class _Request(Struct, frozen=True, kw_only=True, tag_field="do"):
    answer_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that the answer has at least."""


class Switch(_Request, frozen=True, kw_only=True, tag="switch"):
    """Serve in another mode."""

    answer_fields = ("mode", "configured")

    mode: str


class Compare(_Request, frozen=True, kw_only=True, tag="compare"):
    """Say what would change with another mode."""

    answer_fields = ("mode", "appearing", "disappearing", "loses", "kernel")

    mode: str


class Explain(_Request, frozen=True, kw_only=True, tag="explain"):
    """Explain the fate of packets to a frontend."""

    answer_fields = ("mode", "packets")

    to: str
    """ADDRESS[:PORT[/PROTOCOL]], node:PORT[/PROTOCOL] or [NAMESPACE/]SERVICE[:PORT[/PROTOCOL]]."""
    sender: str = field(default="", name="from")
    """An address, ``pod``, ``node`` or ``outside``; "": one of each."""
    origin: str = ""
    """The side of a *sender* that is an address; "": that of the address."""


class Diff(_Request, frozen=True, kw_only=True, tag="diff"):
    """Compare the kernel with the plans."""

    answer_fields = ("mode", "differences")


class Targets(_Request, frozen=True, kw_only=True, tag="targets"):
    """Say what connections of the node to each TCP frontend should do."""

    answer_fields = ("mode", "targets")

    service: str = ""
    """[NAMESPACE/]SERVICE[:PORT[/PROTOCOL]]; "": all."""


class Report(_Request, frozen=True, kw_only=True, tag="report"):
    """Describe the node, its objects and plans, for a bug report."""

    answer_fields = ("mode", "configuration", "node", "objects", "plans")


class Plans(_Request, frozen=True, kw_only=True, tag="plans"):
    """List all plans."""

    answer_fields = ("mode", "plans")


class Status(_Request, frozen=True, kw_only=True, tag="status"):
    """Say whether the proxy is well."""


class Top(_Request, frozen=True, kw_only=True, tag="top"):
    """List service ports with their traffic."""

    answer_fields = ("status", "services", "found", "all", "counted")

    search: Annotated[str, Meta(max_length=200)] = ""
    """Words that their names have."""
    sort: Sort = "name"
    start: Annotated[int, Meta(ge=0)] = 0
    """The place of the first one."""
    count: Annotated[int, Meta(ge=1, le=MOST_SERVICE_PORTS)] = 50


Request = Switch | Compare | Explain | Diff | Targets | Report | Plans | Status | Top

_NAMES = frozenset(kind.__struct_config__.tag for kind in get_args(Request))

_T = TypeVar("_T", bound=_Request)


def parse(given: Mapping[str, Any]) -> Request:
    """Return the request that *given* means, a JSON object. Raises RequestRefused, which names the field."""
    name = given.get("do")
    if not isinstance(name, str) or name not in _NAMES:
        raise RequestRefused(f"unknown request {name!r}: this is kproxy {__version__}")
    try:
        request: Request = convert(given, Request)
    except ValidationError as error:
        raise RequestRefused(_problem(name, error)) from error
    return request


def parse_texts(kind: type[_T], given: Mapping[str, str]) -> _T:
    """Return the request of this *kind* with the fields *given* as text. Raises Misused."""
    try:
        return convert(given, kind, strict=False)
    except ValidationError as error:
        raise Misused(_problem(kind.__struct_config__.tag, error)) from error


def _problem(name: object, error: ValidationError) -> str:
    what, _, where = str(error).partition(" - at `$.")
    return f"request {name!r}: {where.rstrip('`')}: {what}" if where else f"request {name!r}: {what}"

"""The answers of a running proxy and of its commands as typed values, for their writers and their readers.

On the wire and with ``-o json``, each is a JSON object. Unknown fields are ignored, and those that a release
may lack have defaults, so that both ends may differ in their versions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, to_builtins


class Healthz(Struct, frozen=True):
    """The response of ``/healthz``."""

    code: int
    body: Mapping[str, Any]


class ProxyStatus(Struct, frozen=True, kw_only=True):
    """Whether a proxy is well: the answer to `requests.Status`, and of ``kproxy status``.

    Times are in seconds since the epoch, by the node's clock.
    """

    node: str = ""
    mode: str
    configured: str
    """The mode in the configuration; "": none."""
    before: str = ""
    """The mode that served before the last switch; "": none, or the configuration decides."""
    label: str = ""
    """The key of the Node's label that names the mode; "": none does."""
    version: str
    commit: str = ""
    now: float
    started: float = 0.0
    well: bool
    since: float
    problems: Sequence[str]
    fallback: str = ""
    last_sync: float | None = None
    lag: float
    """Seconds for which the oldest change has been waiting; 0: all are programmed."""
    foreign_changes: int
    healthz: Healthz | None = None
    findings: Sequence[str] = ()
    """The checks of ``kproxy doctor`` that have found something. Only the command knows them."""


def replied(reply: Struct) -> Mapping[str, Any]:
    """Return the fields of *reply* as JSON has them."""
    found: Mapping[str, Any] = to_builtins(reply)
    return found

"""The core's handle of one backend."""

from collections.abc import Callable, Sequence
from typing import Any

from kproxy_core.backend.api import (
    BackendSettings,
    Connections,
    Damage,
    Description,
    KernelSide,
    Measurement,
    Preview,
    Question,
    SyncReport,
    Update,
)
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend


class BackendInstance:
    """The hooks of work of one backend, with what observers wrap around them.

    During a switch of modes two exist; each call reaches only one of them.
    """

    def __init__(
        self, description: Description, settings: BackendSettings, backends: tuple[object, ...],
        call: Callable[..., Any],
    ) -> None:
        """*backends*: the base's first, where the mode has one.

        *call* takes the name of a hook and its arguments, and returns the answer of *backends*.
        """
        self.description = description
        self.settings = settings
        """The settings that it was made with."""
        self.backends = backends
        self._call = call

    @property
    def mode(self) -> str:
        return self.description.mode

    def begin(self) -> bool:
        """See `hookspecs.kproxy_begin`. False: the backend does not implement it."""
        return bool(self._call("kproxy_begin"))

    def sync(self, update: Update) -> SyncReport:
        """See `hookspecs.kproxy_sync`."""
        report: SyncReport = self._call("kproxy_sync", update=update)
        return report

    def relays(self, family: Family, key: ServicePortKey) -> frozenset[int]:
        """See `hookspecs.kproxy_relays`. Empty: the kernel forwards."""
        ports: frozenset[int] | None = self._call("kproxy_relays", family=family, key=key)
        return ports or frozenset()

    def render(self, update: Update) -> str:
        """See `hookspecs.kproxy_render`."""
        return str(self._call("kproxy_render", update=update))

    def preview(self, update: Update) -> Preview | None:
        """See `hookspecs.kproxy_preview`. None: the backend does not implement it."""
        found: Preview | None = self._call("kproxy_preview", update=update)
        return found

    def explain(self, questions: Sequence[Question], *, live: bool) -> Sequence[KernelSide] | None:
        """See `hookspecs.kproxy_explain`. None: the backend does not implement it."""
        sides: Sequence[KernelSide] | None = self._call("kproxy_explain", questions=questions, live=live)
        return sides

    def frontends(self, family: Family) -> Sequence[Frontend] | None:
        """See `hookspecs.kproxy_frontends`. None: the backend does not implement it."""
        found: Sequence[Frontend] | None = self._call("kproxy_frontends", family=family)
        return found

    def traffic(self, family: Family) -> Sequence[Connections] | None:
        """See `hookspecs.kproxy_traffic`. None: the backend does not implement it."""
        counted: Sequence[Connections] | None = self._call("kproxy_traffic", family=family)
        return counted

    def watch(self, damaged: Damage) -> bool:
        """See `hookspecs.kproxy_watch`."""
        return bool(self._call("kproxy_watch", damaged=damaged))

    def measure(self) -> Sequence[Sequence[Measurement]]:
        """See `hookspecs.kproxy_measure`; includes the observers' answers."""
        answers: Sequence[Sequence[Measurement]] = self._call("kproxy_measure")
        return answers

    def close(self) -> None:
        """See `hookspecs.kproxy_close`."""
        self._call("kproxy_close")

"""The core's handle of one backend."""

from collections.abc import Sequence
from typing import Any, cast

from pluggy import PluginManager

from kproxy_core.backend import api
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend


class BackendInstance:
    """The hooks of work of one backend, with what observers wrap around them.

    Each method calls the hook of the same name, see `hookspecs`. False or None: the backend does not
    implement it. During a switch of modes two instances exist; each call reaches only one of them.
    """

    def __init__(
        self, mode: str, settings: api.BackendSettings, backends: tuple[object, ...], manager: PluginManager
    ) -> None:
        """*backends*: the base's first, where the mode has one. No others are registered in *manager*."""
        self.mode = mode
        self.settings = settings
        """The settings that it was made with."""
        self.backends = backends
        self.manager = manager
        self._hooks: Any = manager.hook

    def begin(self) -> bool:
        return bool(self._hooks.kproxy_begin())

    def sync(self, update: api.Update) -> api.SyncReport:
        return cast(api.SyncReport, self._hooks.kproxy_sync(update=update))

    def relays(self, family: Family, key: ServicePortKey) -> frozenset[int]:
        return self._hooks.kproxy_relays(family=family, key=key) or frozenset()

    def render(self, update: api.Update) -> str:
        return str(self._hooks.kproxy_render(update=update))

    def check_text(self, update: api.Update) -> str | None:
        return cast(str | None, self._hooks.kproxy_check_text(update=update))

    def preview(self, update: api.Update) -> api.Preview | None:
        return cast(api.Preview | None, self._hooks.kproxy_preview(update=update))

    def explain(self, questions: Sequence[api.Question], *, live: bool) -> Sequence[api.KernelSide] | None:
        sides = self._hooks.kproxy_explain(questions=questions, live=live)
        return cast(Sequence[api.KernelSide] | None, sides)

    def frontends(self, family: Family) -> Sequence[Frontend] | None:
        return cast(Sequence[Frontend] | None, self._hooks.kproxy_frontends(family=family))

    def traffic(self, family: Family) -> Sequence[api.Connections] | None:
        return cast(Sequence[api.Connections] | None, self._hooks.kproxy_traffic(family=family))

    def watch(self, damaged: api.Damage) -> bool:
        return bool(self._hooks.kproxy_watch(damaged=damaged))

    def measure(self) -> Sequence[Sequence[api.Measurement]]:
        """Return the answers of the backend and of observers."""
        return cast(Sequence[Sequence[api.Measurement]], self._hooks.kproxy_measure())

    def close(self) -> None:
        self._hooks.kproxy_close()

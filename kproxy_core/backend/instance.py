"""The core's handle of one backend."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pluggy import PluginManager

from kproxy_core.backend import api
from kproxy_core.backend.calls import HookCalls
from kproxy_core.backend.errors import PluginFailed
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend


class BackendInstance:
    """The hooks of work of one backend, with what observers wrap around them.

    Each method calls the hook of the same name, see `hookspecs`. False or None: the backend does not
    implement it. A call that breaks the contract raises PluginFailed, or where nothing depends on it is only
    logged. During a switch of modes two instances exist; each call reaches only one of them.
    """

    def __init__(
        self, mode: str, settings: api.BackendSettings, backends: tuple[object, ...], manager: PluginManager,
        calls: HookCalls,
    ) -> None:
        """*backends*: the base's first, where the mode has one. No others are registered in *manager*."""
        self.mode = mode
        self.settings = settings
        """The settings that it was made with."""
        self.backends = backends
        self.manager = manager
        self._calls = calls

    def begin(self) -> bool:
        return bool(self._call("kproxy_begin"))

    def sync(self, update: api.Update) -> api.SyncReport:
        report = self._call("kproxy_sync", {"update": update}, problem_of=_lack)
        return cast(api.SyncReport, report)

    def relays(self, family: Family, key: ServicePortKey) -> frozenset[int]:
        """Return the ports; none if the backend fails."""
        try:
            found = self._call("kproxy_relays", {"family": family, "key": key}, may_raise=())
        except PluginFailed:
            return frozenset()
        return frozenset(found or ())

    def render(self, update: api.Update) -> str:
        return str(self._call("kproxy_render", {"update": update}, problem_of=_lack))

    def check_text(self, update: api.Update) -> str | None:
        return cast(str | None, self._call("kproxy_check_text", {"update": update}))

    def preview(self, update: api.Update) -> api.Preview | None:
        return cast(api.Preview | None, self._call("kproxy_preview", {"update": update}))

    def explain(self, questions: Sequence[api.Question], *, live: bool) -> Sequence[api.KernelSide] | None:
        def problem_of(sides: Sequence[api.KernelSide] | None) -> str:
            if sides is None or len(sides) == len(questions):
                return ""
            return f"returned {len(sides)} answers to {len(questions)} questions"

        sides = self._call("kproxy_explain", {"questions": questions, "live": live}, problem_of=problem_of)
        return cast(Sequence[api.KernelSide] | None, sides)

    def frontends(self, family: Family) -> Sequence[Frontend] | None:
        return cast(Sequence[Frontend] | None, self._call("kproxy_frontends", {"family": family}))

    def traffic(self, family: Family) -> Sequence[api.Connections] | None:
        return cast(Sequence[api.Connections] | None, self._call("kproxy_traffic", {"family": family}))

    def watch(self, damaged: api.Damage) -> bool:
        """Return False, too, if the backend fails: its failure hides changes, no more."""

        def checked(family: object, what: object) -> None:
            if isinstance(family, Family) and isinstance(what, str):
                damaged(family, what)
            else:
                found = f"{type(family).__name__} and {type(what).__name__}"
                name = self.manager.get_name(self.backends[-1]) or self.mode
                self._calls.failed(name, "kproxy_watch", f"reported {found}, not Family and str")

        try:
            return bool(self._call("kproxy_watch", {"damaged": checked}, may_raise=()))
        except PluginFailed:
            return False

    def measure(self) -> Sequence[Sequence[api.Measurement]]:
        """Return the answers of the backend and of observers, without those that fail."""
        return self._calls.call_each(self.manager, "kproxy_measure")

    def close(self) -> None:
        """Close the backend. A failure is logged: its sockets end with the process."""
        try:
            self._call("kproxy_close", may_raise=())
        except PluginFailed:
            return

    def _call(self, hook: str, arguments: Mapping[str, object] = {}, **options: Any) -> Any:
        """Return the answer to *hook*; see `HookCalls.call` for *options*."""
        return self._calls.call(getattr(self.manager.hook, hook), arguments, **options)


def _lack(answer: object) -> str:
    return "returned None" if answer is None else ""

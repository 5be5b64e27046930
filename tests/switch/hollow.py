"""A backend that reports success and programs nothing: only a connection reveals it."""

from kproxy_core.contract.hooks import hookimpl
from kproxy_core.contract.values import (
    BackendSettings,
    Damage,
    Description,
    Detection,
    Leftovers,
    Requirement,
    SyncReport,
    Update,
)


class Hollow:
    """Programs nothing."""

    @hookimpl
    def kproxy_sync(self, update: Update) -> SyncReport:
        return SyncReport(0)

    @hookimpl
    def kproxy_render(self, update: Update) -> str:
        return ""

    @hookimpl
    def kproxy_watch(self, damaged: Damage) -> bool:
        return True

    @hookimpl
    def kproxy_close(self) -> None:
        """Nothing is open."""


@hookimpl
def kproxy_describe() -> Description:
    return Description(mode="hollow", summary="promises", contract=(1, 1), preference=-1000)


@hookimpl
def kproxy_detect() -> Detection:
    return Detection("hollow", (Requirement("nothing", True, "nothing"),))


@hookimpl
def kproxy_cleanup() -> Leftovers:
    return Leftovers("hollow")


@hookimpl
def kproxy_make_backend(mode: str, settings: BackendSettings) -> Hollow | None:
    return Hollow() if mode == "hollow" else None

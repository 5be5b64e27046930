"""A backend that reports success and programs nothing: only a connection reveals it."""

from kproxy_core.contract import (
    Backend,
    Damage,
    Description,
    Detection,
    Leftovers,
    Requirement,
    SyncReport,
    Update,
    hookimpl,
)


class Hollow(Backend):
    """Programs nothing."""

    def sync(self, update: Update) -> SyncReport:
        return SyncReport(0)

    def watch(self, damaged: Damage) -> bool:
        return True


@hookimpl
def kproxy_describe() -> Description:
    return Description(mode="hollow", summary="promises", contract=(1, 0), preference=-1000)


@hookimpl
def kproxy_detect() -> Detection:
    return Detection((Requirement("nothing", True, "nothing"),))


@hookimpl
def kproxy_cleanup() -> Leftovers:
    return Leftovers()


@hookimpl
def kproxy_make_backend() -> Backend:
    return Hollow()

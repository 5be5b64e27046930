"""An observer plugin that makes a running kproxy fail, or kills it, at a chosen call of a hook or of `close`.

The file named by KPROXY_FAULT chooses the call: ``CALL NUMBER WHAT``, where NUMBER counts calls since the
file was created. WHAT is ``fail`` (that call and the next two), ``restless`` (that sync and all later ones
report a change) or ``kill``. The file is removed after the fault.
"""

import os
import signal
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from msgspec.structs import replace

from kproxy_core.contract import Backend, BackendSettings, Leftovers, SyncFailed, SyncReport, Update, hookimpl

_TIMES = 3
"""Attempts of each step."""

_file = Path(os.environ.get("KPROXY_FAULT", "/nonexistent"))
_calls: Counter[str] = Counter()


def _what(hook: str) -> str:
    """Return the fault due at this call; "" if none."""
    try:
        at, number, what = _file.read_text().split()
    except FileNotFoundError:
        _calls.clear()
        return ""
    _calls[hook] += 1
    since = _calls[hook] - int(number)
    if at != hook or since < 0 or (what == "kill" and since):
        return ""
    if what == "fail" and since == _TIMES - 1:
        _file.unlink()
    return what


def _happen(hook: str) -> str:
    what = _what(hook)
    if what == "kill":
        _file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fail":
        raise SyncFailed(f"{hook} failed on purpose")
    return what


@hookimpl(wrapper=True)
def kproxy_make_backend() -> Generator[None, Backend, Backend]:
    _happen("kproxy_make_backend")
    backend = yield
    close = backend.close

    def close_or_not() -> None:
        _happen("close")
        close()

    backend.close = close_or_not  # type: ignore[method-assign]
    return backend


@hookimpl(wrapper=True)
def kproxy_sync(update: Update) -> Generator[None, SyncReport, SyncReport]:
    """Fail after the kernel holds the update."""
    report = yield
    if _happen("kproxy_sync") == "restless":
        return replace(report, operations=report.operations + 1)
    return report


@hookimpl(wrapper=True)
def kproxy_retire(settings: BackendSettings) -> Generator[None, list[Leftovers], list[Leftovers]]:
    _happen("kproxy_retire")
    return (yield)


@hookimpl(wrapper=True)
def kproxy_cleanup(
    settings: BackendSettings, dry_run: bool, own_only: bool
) -> Generator[None, list[Leftovers], list[Leftovers]]:
    _happen("kproxy_cleanup")
    return (yield)

"""A backend begins: made, and found able to work before anything depends on it."""

import logging
from collections.abc import Callable
from typing import TypeVar

from kproxy_core.backend.api import BackendSettings
from kproxy_core.backend.errors import BackendError, SyncFailed, Unsupported
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.backend.registry import Registry

log = logging.getLogger("kproxy.run")

_T = TypeVar("_T")


def begin(
    registry: Registry, mode: str, settings: BackendSettings, *, insist: bool = False
) -> BackendInstance:
    """The backend of *mode*, made and able to work as far as can be known without programming anything.

    With *insist* it is enough that it could be made. Raises UnknownMode, PluginRefused or Unsupported.
    """
    instance = _judged(lambda: registry.make_backend(mode, settings))
    try:
        if not _judged(instance.begin):
            detection = registry.detect(mode, settings, load_modules=True)
            if detection.refuted:
                raise Unsupported(detection.because)
    except SyncFailed as error:
        # That may pass, and the sync loop tries again and again.
        log.info("a mode begins with trouble", extra={"fields": {"mode": mode, "error": str(error)}})
    except Unsupported as error:
        if not insist:
            registry.close_backend(instance)
            raise
        log.warning("a mode may not work", extra={"fields": {"mode": mode, "because": str(error)}})
    return instance


def _judged(act: Callable[[], _T]) -> _T:
    """The result of what a plugin does; what goes wrong there must not harm other modes."""
    try:
        return act()
    except BackendError:
        raise
    except Exception as error:
        log.exception("a plugin failed in a way of its own")
        raise Unsupported(f"{type(error).__name__}: {' '.join(str(error).split())}") from error

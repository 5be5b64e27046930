"""The start of a backend: it is made and checked before anything depends on it."""

import logging
from collections.abc import Callable
from typing import TypeVar

from kproxy_core.backend.api import BackendSettings
from kproxy_core.backend.errors import BackendError, InvalidOption, SyncFailed, Unsupported
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.backend.registry import Registry

log = logging.getLogger("kproxy.run")

_T = TypeVar("_T")


def start_backend(
    registry: Registry, mode: str, settings: BackendSettings, *, insist: bool = False
) -> BackendInstance:
    """Make the backend of *mode*, and check that it can work as far as possible without programming rules.

    With *insist*, a failed check is only logged. Raises UnknownMode, PluginRefused, InvalidOption or
    Unsupported.
    """
    instance = _checked(lambda: registry.make_backend(mode, settings))
    try:
        if not _checked(instance.begin):
            detection = registry.detect(mode, settings, load_modules=True)
            if detection.refuted:
                raise Unsupported(detection.because)
    except SyncFailed as error:
        # It may pass, and the sync loop retries.
        log.info("backend start failed, retrying", extra={"fields": {"mode": mode, "error": str(error)}})
    except (InvalidOption, Unsupported) as error:
        if not insist or isinstance(error, InvalidOption):
            registry.close_backend(instance)
            raise
        log.warning("mode may not work", extra={"fields": {"mode": mode, "because": str(error)}})
    return instance


def _checked(act: Callable[[], _T]) -> _T:
    """Return the result of a plugin's *act*. An unexpected exception counts as Unsupported."""
    try:
        return act()
    except BackendError:
        raise
    except Exception as error:
        log.exception("plugin raised an unexpected exception")
        raise Unsupported(f"{type(error).__name__}: {' '.join(str(error).split())}") from error

"""The start of a backend: it is made and checked before anything depends on it."""

import logging

from kproxy_core.backend.api import BackendSettings
from kproxy_core.backend.errors import InvalidOption, PluginFailed, SyncFailed, Unsupported
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.backend.registry import Registry
from kproxy_core.host.errors import HostError

log = logging.getLogger("kproxy.run")


def start_backend(
    registry: Registry, mode: str, settings: BackendSettings, *, insist: bool = False
) -> BackendInstance:
    """Make the backend of *mode*, and check that it can work as far as possible without programming rules.

    With *insist*, a failed check is only logged. Raises UnknownMode, PluginRefused, InvalidOption or
    Unsupported.
    """
    try:
        instance = registry.make_backend(mode, settings)
    except PluginFailed as error:
        raise Unsupported(str(error)) from error
    try:
        if not _begin(instance):
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


def _begin(instance: BackendInstance) -> bool:
    """Return whether the backend has found that it can work. A plugin that fails cannot."""
    try:
        return instance.begin()
    except (HostError, PluginFailed) as error:
        raise Unsupported(str(error)) from error

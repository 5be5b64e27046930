"""``kproxy render``: the rules for a directory of manifests, without touching the kernel."""

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

from kproxy_core.backend.api import Scope, Update
from kproxy_core.backend.registry import Registry
from kproxy_core.cli.planning import read_plans
from kproxy_core.config.settings import Config
from kproxy_core.model.address import Family
from kproxy_core.process.terms import backend_settings


def render_manifests(config: Config, registry: Registry, families: tuple[Family, ...]) -> Iterator[str]:
    """Yield the complete rules of each of *families* in the text format of the backend of ``config.mode``.

    Raises BackendError, HostError or StartFailed.
    """
    instance = registry.make_backend(config.mode, backend_settings(config, families))
    try:
        for plans in read_plans(config, registry, families)[0].values():
            yield instance.render(_sorted(plans.update(Scope.RESYNC)))
    finally:
        registry.close_backend(instance)


def _sorted(update: Update) -> Update:
    """Return *update* in the order of its keys. Planning iterates over sets, in an order that varies."""
    by_key = itemgetter(0)
    return replace(
        update,
        plans=dict(sorted(update.plans.items(), key=by_key)),
        changed=dict(sorted(update.changed.items(), key=by_key)),
    )

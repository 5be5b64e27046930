"""``kproxy render``: the rules for a directory of manifests, without touching the kernel."""

import logging
from collections.abc import Iterator
from queue import SimpleQueue

from kproxy_core.backend.api import Scope
from kproxy_core.backend.registry import Registry
from kproxy_core.config.settings import Config
from kproxy_core.host.netlink.addresses import node_addresses
from kproxy_core.model.address import Family
from kproxy_core.observe.metrics.client import ClientMetrics
from kproxy_core.process.assembly import make_source, make_store
from kproxy_core.process.terms import StartFailed, backend_settings, node_settings
from kproxy_core.store.events import BadObject, Event
from kproxy_core.store.store import Store
from kproxy_core.sync.family_plans import FamilyPlans
from kproxy_core.sync.node_facts import NodeFacts

log = logging.getLogger("kproxy.run")


def render_manifests(config: Config, registry: Registry, families: tuple[Family, ...]) -> Iterator[str]:
    """Yield the complete rules of each of *families* in the text format of the backend of ``config.mode``.

    The node's addresses are those of its Node object, else this machine's. Unusable
    objects are logged. Raises BackendError, HostError or StartFailed.
    """
    settings = node_settings(config, registry.load(config.mode))
    instance = registry.make_backend(config.mode, backend_settings(config, families))
    store = _read(config, settings.name, families)
    own = frozenset(store.node.addresses) if store.node else node_addresses(registry.is_of_node)
    facts = NodeFacts(settings, own)
    facts.node, facts.service_cidrs = store.node, store.service_cidrs
    try:
        for family in families:
            plans = FamilyPlans(family, store)
            plans.set_node(facts.view(family))
            for conflict in plans.plan():
                log.warning(str(conflict))
            yield instance.render(plans.update(Scope.RESYNC))
    finally:
        registry.close_backend(instance)


def _read(config: Config, node_name: str, families: tuple[Family, ...]) -> Store:
    """Read all manifests once."""
    source = make_source(config, node_name, ClientMetrics())
    store = make_store(config, families, source)
    delivered: SimpleQueue[list[Event]] = SimpleQueue()
    try:
        source.start(delivered.put)
    except OSError as error:
        raise StartFailed(f"can't read {config.manifests}: {error}") from error
    try:
        while not store.complete:
            for event in delivered.get():
                store.fold(event)
                if isinstance(event, BadObject):
                    log.warning("not used: %s", event)
    finally:
        source.stop()
    return store

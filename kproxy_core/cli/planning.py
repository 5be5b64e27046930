"""The plans for manifests or for the objects of an API server, read once and without a running proxy."""

import logging
import os
from queue import SimpleQueue

from kproxy_core.apiclient.access import CurrentAccess
from kproxy_core.backend.registry import Registry
from kproxy_core.config.settings import Config
from kproxy_core.host.netlink.addresses import node_addresses
from kproxy_core.model.address import Address, Family
from kproxy_core.process.assembly import make_source, make_store
from kproxy_core.process.terms import StartFailed, node_settings
from kproxy_core.store.events import BadObject, Event
from kproxy_core.store.store import Store
from kproxy_core.sync.family_plans import FamilyPlans
from kproxy_core.sync.node_facts import NodeFacts

log = logging.getLogger("kproxy.run")


def read_plans(
    config: Config, registry: Registry, families: tuple[Family, ...],
    addresses: frozenset[Address] | None = None,
) -> tuple[dict[Family, FamilyPlans], Store]:
    """Return the plans of each of *families* for the objects that *config* names, and the objects.

    *addresses* are the node's; None: those of its Node object, else this machine's. Unusable objects are
    logged. Raises HostError or StartFailed.
    """
    settings = node_settings(config, registry.load(config.mode))
    store = _read(config, settings.name, families)
    if addresses is None:
        addresses = frozenset(store.node.addresses) if store.node else node_addresses(registry.is_of_node)
    facts = NodeFacts(settings, addresses)
    facts.node, facts.service_cidrs = store.node, store.service_cidrs
    found: dict[Family, FamilyPlans] = {}
    for family in families:
        plans = found[family] = FamilyPlans(family, store)
        plans.set_node(facts.view(family))
        for conflict in plans.plan():
            log.warning(str(conflict))
    return found, store


def _read(config: Config, node_name: str, families: tuple[Family, ...]) -> Store:
    if config.kproxy.manifests and not os.path.isdir(config.kproxy.manifests):
        raise StartFailed(f"--manifests: {config.kproxy.manifests}: there is no such directory")
    access = CurrentAccess(config.master, config.client.kubeconfig)
    source = make_source(config, node_name, access, lambda _: None)
    store = make_store(config, families, source)
    delivered: SimpleQueue[list[Event]] = SimpleQueue()
    try:
        source.start(delivered.put)
    except OSError as error:
        raise StartFailed(f"can't read {config.kproxy.manifests}: {error}") from error
    try:
        while not store.complete:
            for event in delivered.get():
                store.fold(event)
                if isinstance(event, BadObject):
                    log.warning("not used: %s", event)
    finally:
        source.stop()
    return store

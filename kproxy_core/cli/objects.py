"""The objects that flags name, read once and planned without a running proxy. Imports most of the program."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple

from kproxy_core.app.assembly import make_source, make_store
from kproxy_core.cli.run import Mistake, begin_access, prepare
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import Config
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings
from kproxy_core.kube.store import Store
from kproxy_core.linux.addresses import node_addresses
from kproxy_core.model.address import Address, Family
from kproxy_core.model.events import BadObject, Event
from kproxy_core.model.service import ServicePortKey
from kproxy_core.modes.choice import conclude
from kproxy_core.modes.settings import (
    StartFailed,
    node_settings,
    served_families,
    serving_settings,
    settings_of_modes,
)
from kproxy_core.observe import logs
from kproxy_core.sync.node_facts import NodeFacts
from kproxy_core.sync.plans import FamilyPlans

log = logging.getLogger("kproxy.run")


class ObjectPlans(FamilyPlans):
    """Plans for objects that no running proxy serves."""

    def relay_problem(self, key: ServicePortKey) -> str:
        """Return "": no relay runs that could fail."""
        return ""


class Objects(NamedTuple):
    """The plans for objects that were read without a running proxy, and a backend of the mode.

    A `kproxy_core.app.answers.PlannedNode`.
    """

    plans: Mapping[Family, ObjectPlans]
    registry: Registry
    instance: BackendInstance
    settings_of: Callable[[str], BackendSettings]
    """Returns the settings of each mode."""
    config: Config
    store: Store
    bad: Sequence[BadObject]
    """What is not used, or only in part."""


@contextmanager
def read_objects(
    flags: Flags, *, this_machine: bool, addresses: frozenset[Address] | None = None,
    families: tuple[Family, ...] = (),
) -> Iterator[Objects]:
    """Yield the plans for the objects that *flags* name.

    Unusable objects are logged, and with `VERBOSE` all steps.

    The node's addresses are those of its Node object, or with *this_machine* those of this machine, or
    *addresses*. *families* are served instead of this machine's. Raises as `cli_errors` expects.
    """
    gc.disable()  # the objects are needed until the command ends
    config, registry, configuration = prepare(flags)
    if not config.mode:
        config = configuration.of(conclude(configuration, registry, served_families()).mode)
    families = families or served_families()
    logs.set_up(config.verbosity if "v" in flags else logs.QUIET, "text", sys.stderr)
    instance = registry.make_backend(config.mode, serving_settings(config, registry, families))
    try:
        settings = node_settings(config, registry.load(config.mode))
        if this_machine:
            addresses = node_addresses(registry.is_of_node)
        store, bad = _read(config, settings.name, families)
        if addresses is None:
            own = store.node
            addresses = frozenset(own.addresses) if own else node_addresses(registry.is_of_node)
        facts = NodeFacts(settings, addresses)
        facts.node, facts.service_cidrs = store.node, store.service_cidrs
        plans = {family: _planned(family, store, facts) for family in families}
        settings_of = settings_of_modes(configuration, families)
        yield Objects(plans, registry, instance, settings_of, config, store, bad)
    finally:
        gc.enable()
        instance.close()


def _planned(family: Family, store: Store, facts: NodeFacts) -> ObjectPlans:
    plans = ObjectPlans(family, store)
    plans.set_node(facts.view(family), facts.addresses)
    for conflict in plans.plan():
        log.warning(str(conflict))
    return plans


def _read(
    config: Config, node_name: str, families: tuple[Family, ...]
) -> tuple[Store, Sequence[BadObject]]:
    if config.kproxy.manifests and not os.path.isdir(config.kproxy.manifests):
        raise Mistake(f"--manifests: {config.kproxy.manifests}: there is no such directory")
    source = make_source(config, node_name, begin_access(config), lambda _: None)
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
    return store, [*source.problems()]

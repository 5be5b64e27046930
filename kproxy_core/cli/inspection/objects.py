"""The objects that flags name, read and planned without a running proxy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from kproxy_core.config.flags import Flags

if TYPE_CHECKING:
    from kproxy_core.backend.api import BackendSettings
    from kproxy_core.backend.instance import BackendInstance
    from kproxy_core.backend.registry import Registry
    from kproxy_core.config.settings import Config
    from kproxy_core.model.address import Address, Family
    from kproxy_core.store.store import Store
    from kproxy_core.sync.family_plans import FamilyPlans

OBJECTS = frozenset({"manifests", "kubeconfig", "master", "config"})
"""Flags that say where objects are, so that no running proxy is asked."""


class Objects(NamedTuple):
    """The plans for objects that were read without a running proxy, and a backend of the mode."""

    plans: Mapping[Family, FamilyPlans]
    registry: Registry
    instance: BackendInstance
    settings_of: Callable[[str], BackendSettings]
    """Returns the settings of each mode."""
    config: Config
    store: Store


def objects_read(flags: Flags) -> Mapping[str, Any]:
    """Return a proxy's report on the objects of *flags*. Raises as `cli_errors` expects."""
    from kproxy_core.config.write import effective
    from kproxy_core.process.inspection.reporting import Objects as StoredObjects
    from kproxy_core.process.inspection.reporting import described

    with read_objects(flags, this_machine=True) as found:
        return {"mode": found.instance.mode, "configuration": effective(found.config),
                **described(found.plans, StoredObjects.of(found.store))}  # fmt: skip


@contextmanager
def read_objects(
    flags: Flags, *, this_machine: bool, addresses: frozenset[Address] | None = None,
    families: tuple[Family, ...] = (),
) -> Iterator[Objects]:
    """Yield the plans for the objects that *flags* name. Raises as `cli_errors` expects.

    *this_machine*: the node has this machine's addresses, whatever its Node object says. *addresses*: it has
    these. *families*: those to serve instead of this machine's.
    """
    from kproxy_core.cli.planning import read_plans
    from kproxy_core.cli.running import prepare
    from kproxy_core.host.netlink.addresses import node_addresses
    from kproxy_core.observe import logs
    from kproxy_core.process.choice import conclude
    from kproxy_core.process.terms import served_families, serving_settings, settings_of_modes

    gc.disable()  # What a command reads lives until it has answered.
    config, registry, configuration = prepare(flags)
    if not config.mode:
        config = configuration.of(conclude(configuration, registry, served_families()))
    families = families or served_families()
    logs.set_up(0, "text")
    instance = registry.make_backend(config.mode, serving_settings(config, registry, families))
    try:
        if this_machine:
            addresses = node_addresses(registry.is_of_node)
        plans, store = read_plans(config, registry, families, addresses)
        yield Objects(plans, registry, instance, settings_of_modes(configuration, families), config, store)
    finally:
        gc.enable()
        registry.close_backend(instance)

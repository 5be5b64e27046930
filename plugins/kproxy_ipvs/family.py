"""Kernel state of one IP family, and the steps that bring it to the plans."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from kproxy_core.contract import (
    Address,
    Destination,
    Family,
    HostError,
    NodeView,
    ServicePlan,
    ServicePortKey,
    SyncReport,
    TrustLost,
    format_socket,
)
from kproxy_ipvs.applied import Applied, Difference, compare, foreign_servers
from kproxy_ipvs.batch import Operation, PutDestination
from kproxy_ipvs.batch import difference as rules_difference
from kproxy_ipvs.kernel import device, sets
from kproxy_ipvs.kernel.servers import Draining, VirtualServers, try_server
from kproxy_ipvs.names import SETS
from kproxy_ipvs.settings import Settings
from kproxy_ipvs.skeleton import skeleton
from kproxy_ipvs.wanted import ServerKey, Style, make_style, schedulers_for
from kproxy_xtables.rules import SERVICES, ipset_mode_chains
from kproxy_xtables.tables import Tables

log = logging.getLogger("kproxy.ipvs")

_PART_SECONDS = 0.1
"""CPU seconds in which a sync writes real servers of virtual servers with many, the rest is for later syncs.

For each new real server the kernel walks those of its virtual server, and all that were deleted in the last
minutes (ip_vs_lookup_dest and ip_vs_trash_get_dest, net/netfilter/ipvs/ip_vs_ctl.c): 65,536 take half a
minute.
"""
_STEP = 100
"""Number of operations after which that time is looked at."""


class FamilyState:
    """Virtual servers, sets, addresses and rules of one family."""

    def __init__(self, family: Family, settings: Settings, servers: VirtualServers, tables: Tables) -> None:
        self.family = family
        self._settings = settings
        self._servers = servers
        self._tables = tables
        self._draining = Draining(servers)
        self._applied = Applied()
        self._node: NodeView | None = None
        """Node of the last acknowledged sync; None: the next sync must be a resync."""
        self._style: Style | None = None
        self._pending: Difference | None = None
        """The difference that is being written, or whose write failed."""
        self._tried: dict[str, bool] = {}
        """The schedulers that only some Services need, and whether the kernel has them."""
        self._unusable: frozenset[tuple[ServerKey, Destination]] = frozenset()
        """Real servers that the kernel refused, as logged."""
        self._are_sets_wide = False
        """The sets have room for `names.MOST_ENTRIES`."""
        self.restore_failures = 0

    def expects(self, address: Address) -> bool:
        """Return whether *address* belongs on the device. Safe to call from any thread."""
        pending = self._pending
        if pending is not None and (address in pending.bind or address in pending.unbind):
            return address in pending.bind
        return address in self._applied.addresses

    def must_resync(self, node: NodeView) -> bool:
        """Return whether the kernel must be read, or *node* changes more than single service ports."""
        if self._node is None or self._style is None:
            return True
        if node == self._node:
            return False
        style = make_style(node, self._settings.scheduler, self._style.elsewhere, self._missing)
        return style != self._style or skeleton(node) != skeleton(self._node)

    def change(self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None]) -> SyncReport:
        """Write the changed plans. O(changed). Raises HostError.

        After a failure the kernel may hold a part of the change, so a resync must follow.
        """
        if self._node is None or self._style is None:
            raise TrustLost("the kernel has not been read yet")
        self._node = None
        self._try_schedulers(changed.values())
        self._style = replace(self._style, missing=self._missing)
        difference = self._applied.difference(changed, self._style)
        unusable = self._write(difference)
        self._applied.acknowledge(difference)
        self._node, self._pending = node, None
        self._unusable |= unusable
        return SyncReport(
            difference.operations - len(unusable), difference.counts, unfinished=self._applied.unfinished)

    def resync(self, node: NodeView, plans: Mapping[ServicePortKey, ServicePlan]) -> SyncReport:
        """Reconcile with *plans* from a fresh read of the kernel. Raises HostError."""
        self._node = None
        created_device = device.ensure()
        entries = sets.read(self.family)
        missing = [kind for kind in SETS if kind not in entries]
        sets.create(self.family, missing)
        if not self._are_sets_wide:
            sets.widen(self.family, entries)
            self._are_sets_wide = True
        on_device, elsewhere = device.read(self.family)
        self._try_schedulers(plans.values())
        style = make_style(node, self._settings.scheduler, elsewhere, self._missing)
        expected = Applied.after(plans, style, self._applied)
        with self._draining.lock:
            held = self._servers.read(self.family)
            foreign = foreign_servers(
                held, on_device, entries, self._settings.exclude_cidrs, node.masquerade_bit)
            difference = compare(expected, held, entries, on_device, foreign)
            self._draining.clear()
            chains = self._tables.chains()
            text = rules_difference(chains, skeleton(node))
            takeover = SERVICES in chains and SERVICES not in ipset_mode_chains(chains)
            self._unusable = self._write(difference, text, takeover=takeover)
        expected.leave(difference.rest)
        self._applied, self._style = expected, style
        self._node, self._pending = node, None
        operations = difference.operations - len(self._unusable) + len(missing) + created_device
        operations += text.count("\n-") + text.count("\n:")
        return SyncReport(operations, difference.counts, unfinished=expected.unfinished)

    def close(self) -> None:
        self._draining.close()

    @property
    def _missing(self) -> frozenset[str]:
        return frozenset(name for name, exists in self._tried.items() if not exists)

    def _try_schedulers(self, plans: Iterable[ServicePlan | None]) -> None:
        """Try the schedulers that *plans* are the first to need. Their modules are loaded by that."""
        configured = self._settings.scheduler
        for plan in plans:
            for name in schedulers_for(plan, configured).difference(self._tried) if plan is not None else ():
                try:
                    try_server(name, self.family)
                    self._tried[name] = True
                except HostError as error:
                    self._tried[name] = False
                    log.error("the kernel lacks a scheduler, weights or hashes have no effect", extra={
                        "fields": {"scheduler": name, "family": self.family.label, "error": str(error)}})

    def _write(
        self, difference: Difference, rules_text: str = "", *, takeover: bool = False
    ) -> frozenset[tuple[ServerKey, Destination]]:
        """Write *difference*: objects before what refers to them, deletions in the reverse order.

        What takes long is left in `Difference.rest`.

        The rules decide about masquerading, so they precede new virtual servers. In a *takeover* the rules
        end the other mode, so they follow all additions, and are written only if those succeeded.

        Returns the real servers that the kernel refused. Raises the first HostError, after trying the other
        steps.
        """
        problems: list[HostError] = []

        def attempt(step: Callable[[], object]) -> bool:
            try:
                step()
            except HostError as error:
                problems.append(error)
                return False
            return True

        unusable: list[PutDestination] = []

        def write_servers(operations: Sequence[Operation]) -> None:
            unusable.extend(self._servers.write([self._revived(operation) for operation in operations]))

        self._pending = difference
        with self._draining.lock:
            at_once, others = difference.split()
            attempt(lambda: sets.write(self.family, difference.adds))
            if rules_text and not takeover:
                attempt(lambda: self._restore(rules_text))
            attempt(partial(write_servers, at_once))
            started, done = time.thread_time(), 0
            while done < len(others) and time.thread_time() < started + _PART_SECONDS:
                part = others[done : done + _STEP]
                attempt(partial(write_servers, part))
                done += len(part)
            difference.leave(others[done:])
            attempt(lambda: device.bind(difference.bind, self.family))
            if rules_text and takeover and not problems:
                attempt(lambda: self._restore(rules_text))
            self._draining.forget_all_of({operation.key for operation in difference.deleted})
            # Addresses and entries identify a virtual server as ours, so they must outlive it.
            if attempt(lambda: self._servers.write(difference.deleted)):
                attempt(lambda: device.unbind(difference.unbind, self.family))
                attempt(lambda: sets.write(self.family, (), difference.deletes))
            attempt(lambda: self._draining.add(set(difference.draining), later=difference.large))
        for one in unusable:
            if (one.key, one.where) not in self._unusable:
                log.error("the kernel refuses a real server", extra={"fields": {
                    "virtual_server": str(one.key), "real_server": format_socket(*one.where)}})
        if problems:
            raise problems[0]
        return frozenset((one.key, one.where) for one in unusable)

    def _restore(self, text: str) -> None:
        """Write rules and count failures. Raises HostError."""
        try:
            self._tables.restore(text)
        except HostError:
            self.restore_failures += 1
            raise

    def _revived(self, operation: Operation) -> Operation:
        """Change the weight of a real server that is still draining, instead of creating it again."""
        if not isinstance(operation, PutDestination) or not operation.new:
            return operation
        return operation._replace(new=not self._draining.forget(operation.key, operation.where))

"""One IP family: what it is known to hold, and how it gets to what is wanted."""

import logging
from collections.abc import Callable, Container, Mapping

from kproxy_core.backend.api import SyncReport
from kproxy_core.backend.errors import SyncFailed, TrustLost
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Address, Family, Protocol, format_address, format_socket
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ipvs import names, skeleton
from kproxy_ipvs.applied import Applied, Difference, Entries, compare_all, described
from kproxy_ipvs.batch.rules import difference as rules_difference
from kproxy_ipvs.batch.servers import Operation, PutDestination
from kproxy_ipvs.kernel import device, rules, sets
from kproxy_ipvs.kernel.draining import Draining
from kproxy_ipvs.kernel.virtual_servers import VirtualServers
from kproxy_ipvs.names import SETS
from kproxy_ipvs.settings import Settings
from kproxy_ipvs.wanted import ServerKey, Style
from kproxy_xtables.shared_chains import SERVICES, ipset_mode_chains
from kproxy_xtables.tables import Tables

log = logging.getLogger("kproxy.ipvs")


class FamilyState:
    """Virtual servers, sets, addresses and rules of one family."""

    def __init__(self, family: Family, settings: Settings, servers: VirtualServers, tables: Tables) -> None:
        self.family = family
        self._settings = settings
        self._servers = servers
        self._tables = tables
        self._draining = Draining(servers.delete_drained)
        self._applied: Applied | None = None
        """None: only a resync will do."""
        self._node: NodeView | None = None
        self._style: Style | None = None
        self._wanted: Container[Address] = ()
        """On the device."""
        self._unusable: frozenset[tuple[ServerKey, Destination]] = frozenset()
        """Real servers that the kernel does not take, as far as that was told."""
        self.restore_failures = 0

    def wants(self, address: Address) -> bool:
        """Whether *address* is to be on the device. May be asked from any thread."""
        return address in self._wanted

    def must_resync(self, node: NodeView) -> bool:
        """Whether *node* changes what no single service port answers for."""
        if self._applied is None or self._node is None or self._style is None:
            return True
        if node == self._node:
            return False
        return skeleton.rules_differ(self._node, node) or self._style != self._make_style(
            node, self._style.elsewhere
        )

    def change(self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None]) -> SyncReport:
        """Write what the changed plans need. O(changed). Raises HostError or SyncFailed."""
        applied, self._applied = self._applied, None
        if applied is None or self._style is None:
            raise TrustLost("the kernel has not been read yet")
        difference = applied.change(changed, self._style)
        unusable = self._write(difference)
        self._unusable |= unusable
        self._applied, self._node = applied, node
        return SyncReport(difference.operations - len(unusable), dict(described(difference)))

    def resync(self, node: NodeView, plans: Mapping[ServicePortKey, ServicePlan]) -> SyncReport:
        """Make everything right whatever is there, and write only what differs.

        Raises HostError or SyncFailed.
        """
        marks = self._applied.marks if self._applied is not None else None
        self._applied = None
        made = device.ensure()
        entries = sets.read(self.family)
        missing = [kind for kind in SETS if kind not in entries]
        sets.create(self.family, missing)
        ours, elsewhere = device.read(self.family)
        style = self._make_style(node, elsewhere)
        applied = Applied(node.masquerade_bit)
        if marks is not None and self._node is not None and self._node.masquerade_bit == node.masquerade_bit:
            applied.marks = marks
        applied.change(plans, style)
        self._wanted = applied.addresses
        with self._draining.lock:
            held = self._servers.read(self.family)
            foreign = [key for key in held if self._is_foreign(key, ours, entries, node.masquerade_bit)]
            difference = compare_all(applied, held, entries, ours, foreign)
            self._draining.clear()
            chains = rules.read(self._tables)
            text = rules_difference(chains, skeleton.skeleton(node))
            takeover = SERVICES in chains and SERVICES not in ipset_mode_chains(chains)
            self._unusable = self._write(difference, text, takeover=takeover)
        self._applied, self._node, self._style = applied, node, style
        operations = difference.operations - len(self._unusable) + len(missing) + made
        operations += text.count("\n-") + text.count("\n:")
        return SyncReport(operations, dict(described(difference)))

    def close(self) -> None:
        self._draining.close()

    def _make_style(self, node: NodeView, elsewhere: frozenset[Address]) -> Style:
        return Style(
            family=self.family,
            scheduler=self._settings.scheduler,
            node_ip=node.node_ip,
            node_port_addresses=tuple(
                address for address in node.node_port_addresses
                if not (self.family is Family.IPV6 and address[:2] == b"\xfe\x80")
            ),
            elsewhere=elsewhere,
        )  # fmt: skip

    def _is_foreign(
        self, key: ServerKey, on_device: frozenset[Address], entries: Entries, masquerade_bit: int
    ) -> bool:
        """Whether somebody else made this virtual server: nothing that this mode leaves speaks of it."""
        if key.address is None:
            return not names.is_own_mark(key.mark, masquerade_bit)
        if any(key.address in cidr for cidr in self._settings.exclude_cidrs):
            return True
        text = format_address(key.address)
        if key.address in on_device or text in entries.get(names.IPVS_IPS, ()):
            return False
        every, _ = names.NODE_PORT_SETS[Protocol(key.protocol)]
        entry = str(key.port) if every.type == "bitmap:port" else f"{text},sctp:{key.port}"
        return entry not in entries.get(every, ())

    def _write(
        self, difference: Difference, rules_text: str = "", *, takeover: bool = False
    ) -> frozenset[tuple[ServerKey, Destination]]:
        """Bring what is new first, and what leads to it last; take away in the other order.

        The rules decide about masquerading, so they go before what is served here for the first time; but
        in a *takeover* they end the other mode, so they go after, and only if all else went well.

        Returns the real servers that can't be. Raises HostError or SyncFailed about the first thing that went
        wrong, when all others are done.
        """
        problems: list[HostError | SyncFailed] = []

        def attempt(step: Callable[[], object]) -> None:
            try:
                step()
            except (HostError, SyncFailed) as error:
                problems.append(error)

        unusable: list[PutDestination] = []
        operations = [self._revived(operation) for operation in difference.servers]
        with self._draining.lock:
            attempt(lambda: sets.write(self.family, difference.adds))
            if rules_text and not takeover:
                attempt(lambda: self._restore(rules_text))
            attempt(lambda: unusable.extend(self._servers.write_usable(operations)))
            attempt(lambda: device.bind(difference.bind, self.family))
            if rules_text and takeover and not problems:
                attempt(lambda: self._restore(rules_text))
            attempt(lambda: self._servers.write(difference.gone))
            for operation in difference.gone:
                self._draining.forget_server(operation.key)
            attempt(lambda: device.unbind(difference.unbind, self.family))
            attempt(lambda: sets.write(self.family, (), difference.deletes))
            attempt(lambda: self._draining.add(difference.leaving))
        for one in unusable:
            if (one.key, one.where) not in self._unusable:
                log.error("a real server is not usable", extra={"fields": {
                    "virtual_server": str(one.key), "real_server": format_socket(*one.where)}})
        if problems:
            raise problems[0]
        return frozenset((one.key, one.where) for one in unusable)

    def _restore(self, text: str) -> None:
        """Raises HostError."""
        try:
            self._tables.restore(text)
        except HostError:
            self.restore_failures += 1
            raise

    def _revived(self, operation: Operation) -> Operation:
        """A real server that comes back before it has drained is there already."""
        if not isinstance(operation, PutDestination) or not operation.new:
            return operation
        return operation._replace(new=not self._draining.forget(operation.key, operation.where))

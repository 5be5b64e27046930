"""Kernel state of one IP family, and the steps that bring it to the plans."""

import logging
from collections.abc import Iterable, Mapping
from itertools import chain

from kproxy_core.contract import HostError, NodeView, ServicePlan, ServicePortKey, SyncReport, TrustLost
from kproxy_iptables import batch, kernel
from kproxy_iptables.applied import Applied, FullDifference, Plans, count_endpoints, owner_of
from kproxy_iptables.kernel import enable_route_localnet, ensure_counters, read_facts
from kproxy_iptables.skeleton import Facts, rules_differ, serves_loopback
from kproxy_iptables.wanted import make_style
from kproxy_xtables.tables import Busy, RestoreFailed, Tables

log = logging.getLogger("kproxy.iptables")

_MOST_REFUSED = 20
"""Limit for the service ports that one resync may omit before it fails as a whole."""


class FamilyState:
    """The mode's chains and rules in the tables filter, nat and mangle of one family."""

    def __init__(self, tables: Tables, *, localhost_node_ports: bool) -> None:
        self.tables = tables
        self.rules: Mapping[str, int] = {}
        """Number of rules in the kernel by table. Other threads read this and the next four."""
        self.last_rules: Mapping[str, int] = {}
        """Number of rules that kube-proxy would have written in the last sync, by table."""
        self.failures = 0
        """Failed calls of iptables-restore."""
        self.partial_failures = 0
        """Failed syncs of changed Services only."""
        self.busy = 0
        """Timeouts while waiting for the xtables lock."""
        self._localhost_node_ports = localhost_node_ports
        self._applied = Applied()
        self._facts = Facts()
        self._node: NodeView | None = None
        """Node of the last acknowledged sync; None: the next sync must be a resync."""

    def must_resync(self, node: NodeView) -> bool:
        """Return whether more than the rules of changed service ports may have to be written."""
        return self._node is None or rules_differ(self._node, node)

    def change(self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None]) -> SyncReport:
        """Write the difference to the *changed* plans, of a large one a part. O(changed).

        Raises Busy, or TrustLost if the kernel lacks what it acknowledged.
        """
        difference = self._applied.difference(changed, node, self._facts)
        references, late = difference.references, list[str]()
        per_call = self.tables.chains_per_call
        if len(references.stale) > per_call:
            references.stale, late = late, references.stale
        inputs = batch.inputs(difference.chains, lambda: references, chains_per_call=per_call)
        try:
            self._send(chain(inputs, batch.deletions(late, per_call)))
        except Busy:
            raise
        except HostError as error:
            self._node = None
            self.partial_failures += 1
            raise TrustLost(str(error)) from error
        self._applied.acknowledge(difference)
        self._acknowledged(node, self._applied.last_rules(difference))
        unfinished = frozenset(key for key, held in difference.prepared.items() if held)
        operations = len(difference.chains) + references.operations + len(late)
        return SyncReport(operations, unfinished=unfinished)

    def resync(self, node: NodeView, plans: Plans) -> SyncReport:
        """Write the difference between the *plans* and a fresh read of the kernel.

        A service port with a rule that the kernel refuses is omitted until the next resync.

        Raises HostError, SyncFailed.
        """
        self._node = None
        localhost = serves_loopback(node, enabled=self._localhost_node_ports)
        self._facts = read_facts(ensure_counters(), localhost_node_ports=localhost)
        if localhost:
            enable_route_localnet()
        for _ in range(_MOST_REFUSED):
            try:
                return self._compare_and_send(node, plans)
            except RestoreFailed as failure:
                style = make_style(node, self._facts, count_endpoints(plans))
                key = owner_of(failure.line, plans, style) if failure.line else None
                if key is None:
                    raise
                log.error("rule refused, service port not programmed", extra={
                    "fields": {"service_port": str(key), "protocol": key.protocol.name, "error": str(failure)}
                })
                plans = {other: plan for other, plan in plans.items() if other != key}
        return self._compare_and_send(node, plans)

    def _compare_and_send(self, node: NodeView, plans: Plans) -> SyncReport:
        woken = self.tables.wake()
        difference = FullDifference(kernel.read(self.tables), plans, node, self._facts)
        per_call = self.tables.chains_per_call
        self._send(batch.inputs(difference.chains(), difference.references, chains_per_call=per_call))
        try:
            self._send(batch.deletions(difference.stale, per_call))
        except HostError as error:  # A foreign rule may jump to one of them.
            log.warning("stale chains not deleted", extra={"fields": {"error": str(error)}})
        self._applied = difference.acknowledged()
        self._acknowledged(node, self._applied.last_rules())
        return SyncReport(difference.operations + len(woken))

    def _send(self, inputs: Iterable[str]) -> None:
        """Give *inputs* to iptables-restore.

        Raises Busy if nothing has changed, else what `Tables.restore` raises.
        """
        for number, text in enumerate(inputs):
            try:
                self.tables.restore(text)
            except Busy as busy:
                self.busy += 1
                if number:
                    raise HostError(str(busy)) from busy
                raise
            except RestoreFailed:
                self.failures += 1
                raise

    def _acknowledged(self, node: NodeView, last: Mapping[str, int]) -> None:
        self._node = node
        self.rules, self.last_rules = dict(self._applied.rules), last

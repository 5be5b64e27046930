"""One family's tables: what they are known to hold, and how they get to what is wanted."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from kproxy_core.backend.api import SyncReport
from kproxy_core.backend.errors import TrustLost
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_iptables import batch, names
from kproxy_iptables.applied import Applied, Comparison, Plans, count_endpoints, owner_of
from kproxy_iptables.metrics import Counts
from kproxy_iptables.kernel.requirements import enable_route_localnet, read_facts
from kproxy_iptables.kernel.rules import observe
from kproxy_iptables.skeleton import Facts, constant_rules
from kproxy_iptables.wanted import LARGE_CLUSTER, Style, make_style
from kproxy_xtables.rules import ChainKey
from kproxy_xtables.tables import Busy, RestoreFailed, Tables

log = logging.getLogger("kproxy.iptables")

_MOST_REFUSED = 20
"""Service ports that one full sync goes without before it fails as a whole."""


class FamilyTables:
    """The tables filter, nat and mangle of one family, as far as they are ours."""

    def __init__(self, kernel: Tables, *, localhost_node_ports: bool) -> None:
        self.kernel = kernel
        self._localhost_node_ports = localhost_node_ports
        self._applied = Applied()
        self._node: NodeView | None = None
        """The node that the rules were last made for; None: only a resync will do."""
        self._facts: Facts | None = None
        self._constant: Counter[str] = Counter()
        """Rules that are there without any Service, by table."""
        self._written: Counter[str] = Counter()
        """Rules written by the sync that is under way, by table."""
        self.counts = Counts(kernel.family)

    def must_resync(self, node: NodeView) -> bool:
        """Whether more than the rules of changed Services has to be looked at."""
        return self._node is None or _for_rules(node) != _for_rules(self._node)

    def change(self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None]) -> SyncReport:
        """Write what the *changed* plans need. O(changed).

        Raises Busy, or TrustLost if the kernel does not hold what it should.
        """
        self._written = Counter[str]()
        facts = self._facts_for(node)
        style = _style(node, facts, self._applied.endpoints_after(changed))
        difference = self._applied.difference(changed, style)
        references, stale = difference.references, list[str]()
        if len(references.stale) > self.kernel.chains_per_call:
            references.stale, stale = stale, references.stale
        try:
            self._send(
                batch.calls(
                    difference.chains, lambda: references, chains_per_call=self.kernel.chains_per_call
                )
            )
            self._send(batch.deletions(stale, self.kernel.chains_per_call))
        except Busy:
            raise
        except HostError as error:
            self._node = None
            self.counts.partial_failures += 1
            raise TrustLost(str(error)) from error
        self._applied.acknowledge(difference)
        self._acknowledge(node)
        return SyncReport(len(difference.chains) + references.operations + len(stale))

    def resync(self, node: NodeView, plans: Plans) -> SyncReport:
        """Make the rules right whatever they are, and leave alone what is right already.

        A service port with a rule that this kernel does not take goes without rules, the others
        do not suffer; the next resync tries again. Raises HostError or SyncFailed.
        """
        self._node = None
        self._facts = None
        self._written = Counter[str]()
        facts = self._facts_for(node)
        if facts.localhost_node_ports:
            enable_route_localnet()
        for _ in range(_MOST_REFUSED):
            try:
                return self._compare_and_send(node, plans, facts)
            except RestoreFailed as failure:
                style = _style(node, facts, count_endpoints(plans))
                key = owner_of(failure.line, plans, style) if failure.line else None
                if key is None:
                    raise
                log.error("a service port gets no rules, because one was refused", extra={
                    "fields": {"service_port": str(key), "protocol": key.protocol.name, "error": str(failure)}
                })
                plans = {other: plan for other, plan in plans.items() if other != key}
        return self._compare_and_send(node, plans, facts)

    def _compare_and_send(self, node: NodeView, plans: Plans, facts: Facts) -> SyncReport:
        style = _style(node, facts, count_endpoints(plans))
        comparison = Comparison(observe(self.kernel.save()), plans, node, style, facts)
        self._send(
            batch.calls(
                comparison.chains(),
                comparison.references,
                mark_masq=comparison.mark_masq(),
                chains_per_call=self.kernel.chains_per_call,
            )
        )
        self._delete(comparison.stale)
        self._applied = comparison.acknowledged()
        self._constant = _count(constant_rules(node, facts))
        self._acknowledge(node)
        return SyncReport(comparison.operations)

    def _delete(self, stale: list[str]) -> None:
        """Delete chains that nothing of ours leads to. If somebody else's rule does, they stay."""
        try:
            self._send(batch.deletions(stale, self.kernel.chains_per_call))
        except HostError as error:
            log.warning("stale chains were not deleted", extra={"fields": {"error": str(error)}})

    def _send(self, inputs: Iterable[str]) -> None:
        """Raises Busy if nothing has changed, else what `Tables.restore` raises."""
        for sent, text in enumerate(inputs):
            try:
                self.kernel.restore(text)
            except Busy as busy:
                self.counts.busy += 1
                if sent:
                    raise HostError(str(busy)) from busy
                raise
            except RestoreFailed:
                self.counts.failures += 1
                raise
            self._written.update(batch.rules_in(text))

    def _acknowledge(self, node: NodeView) -> None:
        self._node = node
        for table in (names.FILTER, names.NAT):
            self.counts.rules[table] = self._applied.rules[table] + self._constant[table]
            self.counts.written[table] = self._written[table]

    def _facts_for(self, node: NodeView) -> Facts:
        """What this kernel can do, as of the last full sync, as far as it is not the node's own doing."""
        if self._facts is None:
            self._facts = read_facts()
        localhost = (
            self._localhost_node_ports and node.family is Family.IPV4 and node.node_ports_on_loopback
        )
        return replace(self._facts, localhost_node_ports=localhost)


def _style(node: NodeView, facts: Facts, endpoints: int) -> Style:
    counted = facts.localhost_node_ports and names.LOCALHOST_COUNTER in facts.counters
    return make_style(node, localhost_counted=counted, comments=endpoints <= LARGE_CLUSTER)


def _for_rules(node: NodeView) -> object:
    """What of *node* rules depend on."""
    return (
        node.local_source,
        node.node_ports_anywhere or node.node_port_addresses,
        node.node_ports_on_loopback,
        node.masquerade_all,
        node.masquerade_bit,
    )


def _count(rules: Mapping[ChainKey, list[str]]) -> Counter[str]:
    """How many *rules* there are in each table."""
    counted: Counter[str] = Counter()
    for (table, _), of_chain in rules.items():
        counted[table] += len(of_chain)
    return counted

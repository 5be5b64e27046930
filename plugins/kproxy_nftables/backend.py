"""The nftables mode: one table for each IP family."""

import logging
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from kproxy_core.contract import (
    Backend,
    BackendError,
    BackendSettings,
    Connections,
    Damage,
    Family,
    Frontend,
    HostError,
    IsRemoved,
    KernelSide,
    Measurement,
    Preview,
    Protocol,
    Question,
    Scope,
    SyncFailed,
    SyncReport,
    Unsupported,
    Update,
    sync_family,
)
from kproxy_core.linux import process
from kproxy_core.linux.rulesets import marker_changes
from kproxy_core.netlink.messages import TooLong
from kproxy_core.nft.watch import CommitWatch
from kproxy_nft import counting
from kproxy_nftables.detect import FLOW_OFFLOAD, PERMISSION, can_own, lacking
from kproxy_nftables.family import FamilyState
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import NODE_PORTS, NOT_RELAYED, REFUSED
from kproxy_nftables.settings import FLOWTABLE, read_settings
from kproxy_nftables.watch import Watcher

# Traffic: the counters of the sets that rules fill.


def connections(family: Family) -> list[Connections]:
    """Return the new connections counted for each frontend and endpoint. Raises BackendError."""
    with Kernel() as kernel:
        return [
            one for container in (counting.CONNECTIONS, REFUSED)
            for one in counting.connections(family, kernel.counters(family, container).items())
        ]


def not_relayed(family: Family) -> int:
    """Return the packets counted to SCTP node ports on loopback. Raises BackendError."""
    with Kernel() as kernel:
        counts = kernel.counters(family, NOT_RELAYED)
        return sum(number for key, number in counts.items()
                   if kernel.holds(family, NODE_PORTS, key[family.size:]))


# The nftables mode: one table for each IP family.

log = logging.getLogger("kproxy.nftables")


class NftablesBackend(Backend):
    """Programs one table for each IP family.

    What only answers questions is imported with the first of these.
    """

    def __init__(self, settings: BackendSettings) -> None:
        """Raises InvalidOption."""
        self._kernel = Kernel()
        self._settings = read_settings(settings)
        self._may_own = settings.own_tables
        self._states = self._new_states(settings.families)
        self._marked: set[Family] = set()
        """Families of which the marker has been brought to the settings."""
        self._watch: CommitWatch | None = None
        self._generation = 0

    def begin(self) -> bool:
        """Check that the kernel accepts the rules' features. Raises Unsupported.

        A flowtable is no requirement: without it packets take the ordinary way.
        """
        if "CAP_NET_ADMIN" not in process.network_privileges():
            raise Unsupported(f"permission denied, {PERMISSION}")
        families = tuple(self._states)
        missing = lacking(self._kernel, families)
        if missing:
            raise Unsupported("; ".join(missing))
        if self._settings.flowtable and (missing := lacking(self._kernel, families, [FLOW_OFFLOAD])):
            log.warning("flowtable not available", extra={"fields": {
                "option": FLOWTABLE, "error": "; ".join(missing)}})
            self._settings = self._settings._replace(flowtable=())
        self._states = self._new_states(families, owned=self._may_own and can_own(self._kernel))
        return True

    def _new_states(self, families: Sequence[Family], *, owned: bool = False) -> dict[Family, FamilyState]:
        return {family: FamilyState(family, self._kernel, self._settings, owned=owned) for family in families}

    def sync(self, update: Update) -> SyncReport:
        try:
            report = sync_family(self._states[update.family], update)
        except TooLong as error:
            raise SyncFailed(str(error)) from error
        if update.scope is Scope.RESYNC or update.family not in self._marked:
            report = replace(report, degraded=self._mark(update.family))
        if self._watch is None:
            self._generation = self._kernel.generation()
        return report

    def _mark(self, family: Family) -> str:
        """Create the marker, or delete it if it is not wanted. Return why that failed; "": it did not."""
        self._marked.discard(family)
        try:
            if commands := marker_changes(family, wanted=self._settings.marked):
                self._kernel.run(commands)
        except (BackendError, HostError) as error:
            return f"calicoMarker is not in effect: {error}"
        self._marked.add(family)
        return ""

    def reset_connections(self, family: Family, is_removed: IsRemoved) -> int:
        """Let kproxy's rules reset connections that bypass them by a flowtable."""
        self._states[family].have_flows_meet_rules()
        return 0

    def wants_relays(self, family: Family, protocol: Protocol) -> bool:
        return True

    def render(self, update: Update) -> str:
        """Return the whole table as input for `nft -f`."""
        from kproxy_nftables.render import render_text

        return render_text(update, self._settings)

    def check_text(self, update: Update) -> str:
        """Have libnftables check the table in an empty network namespace.

        Without the flowtable: its devices are the node's, and a kernel that has none serves without it.
        """
        from kproxy_core.linux.libnftables import complaint
        from kproxy_nftables.render import render_text

        return complaint(render_text(update, self._settings._replace(flowtable=())))

    def preview(self, update: Update) -> Preview:
        from kproxy_nftables.render import preview

        return preview(update, self._settings, may_own=self._may_own)

    def explain(self, questions: Sequence[Question], *, live: bool) -> Sequence[KernelSide]:
        from kproxy_nftables.explain import explain

        return explain(questions, live=live, settings=self._settings)

    def frontends(self, family: Family) -> Sequence[Frontend]:
        from kproxy_nftables.explain import frontends

        return frontends(family)

    def traffic(self, family: Family) -> Sequence[Connections]:

        return connections(family)

    def watch(self, damaged: Damage) -> bool:
        """Start watching our tables. Any commit since the last sync is reported as damage."""
        try:
            self._watch = Watcher(self._kernel.own_ports, damaged, marked=self._settings.marked)
        except OSError as error:
            log.warning("cannot watch for foreign rule changes", extra={"fields": {"error": str(error)}})
            return False
        if self._kernel.generation() != self._generation:
            for family in self._states:
                damaged(family, "rules changed while the watch began")
        return True

    def measure(self) -> list[Measurement]:
        found = []
        for family, state in self._states.items():
            labels = {"ip_family": family.label}
            found.append(Measurement(
                "kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total",
                "Failures to delete unreferenced chains, maps and sets", "counter",
                state.cleanup_failures, labels))
            with suppress(SyncFailed):
                if state.is_relayed:
                    found.append(Measurement(
                        "kubeproxy_nftables_localhost_nodeport_rejected_packets_total",
                        "Packets to node ports on loopback that are not relayed", "counter",
                        not_relayed(family), {**labels, "protocol": Protocol.SCTP.name}))
        return found

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._kernel.close()

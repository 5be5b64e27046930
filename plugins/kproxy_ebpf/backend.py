"""The backend: maps and programs in front of the base mode's rules.

Its base programs the rules. They serve whatever the programs leave alone, so neither the order of
the two nor a failure of the programs can lose a connection.
"""

import logging
import time
from collections.abc import Sequence

from msgspec.structs import replace

from kproxy_core.contract import (
    Address,
    Backend,
    BackendSettings,
    Connections,
    Damage,
    Family,
    HostError,
    IsRemoved,
    KernelSide,
    LayeredBackend,
    Measurement,
    NodeView,
    Preview,
    Protocol,
    Question,
    Scope,
    SyncFailed,
    SyncReport,
    TrustLost,
    Unsupported,
    Update,
)
from kproxy_core.linux.conntrack import accounting_enabled
from kproxy_ebpf import names
from kproxy_ebpf.detect import lacking
from kproxy_ebpf.explain import explain
from kproxy_ebpf.family import FamilyState
from kproxy_ebpf.kernel.maps import Kernel, leave_to_rules, pinned_maps
from kproxy_ebpf.kernel.programs import Compilation, ProgramRefused, StillCompiling
from kproxy_ebpf.kernel.sockets import reset_connections
from kproxy_ebpf.render import preview, render_text
from kproxy_ebpf.settings import read_settings
from kproxy_ebpf.traffic import Traffic
from kproxy_ebpf.watch import Look, Watcher

log = logging.getLogger("kproxy.ebpf")

_PATIENCE = 20.0
"""Seconds for which the first sync waits for the compiler, if it is needed. It takes half a second on a node,
17 on a kernel that is emulated."""
_POLL = 0.05
"""Seconds for which later syncs wait."""
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 300.0
"""Seconds between two attempts to set the programs up. One that compiles takes 126 MiB and half a second."""


class EbpfBackend(LayeredBackend):
    """Programs the maps of both families."""

    def __init__(self, base: Backend, settings: BackendSettings) -> None:
        super().__init__(base)
        self._settings = read_settings(settings)
        self._families_served = settings.families
        self._counted = settings.count_traffic
        self._counts = Traffic(self._settings)
        self._compilation: Compilation | None = None
        self._kernel: Kernel | None = None
        self._families: dict[Family, FamilyState] = {}
        self._watcher: Watcher | None = None
        self._patience = _PATIENCE
        self._delay = _FIRST_DELAY
        self._retry_at = 0.0
        """On the monotonic clock."""
        self._trouble = ""
        """Why the rules serve local sockets."""
        self._is_detached = False
        """No program chooses endpoints since the last attempt failed, one of an earlier process included."""

    def begin(self) -> bool:
        """Check the base and the programs' requirements; start the compiler if needed. Raises Unsupported."""
        can_begin = self.base.begin()
        missing = lacking(self._settings)
        if missing:
            raise Unsupported("; ".join(missing))
        try:
            self._compilation = Compilation()
        except HostError as error:
            raise Unsupported(str(error)) from error
        return can_begin

    def sync(self, update: Update) -> SyncReport:
        """Withdraw endpoints, have the rules changed, then add endpoints."""
        kernel = self._kernel
        if kernel is None:
            report = self.base.sync(update)
            operations = self._set_up(update)
            return replace(report, operations=report.operations + operations, degraded=self._trouble)
        state = self._families[update.family]
        difference = state.withdraw(update)
        try:
            report = self.base.sync(update)
        except TrustLost:
            state.distrust()
            raise
        except SyncFailed:
            state.restore(difference)
            raise
        except Exception:
            state.distrust()
            raise
        try:
            operations = state.write(update, difference)
        except Exception:
            state.distrust()
            raise
        if update.scope is Scope.RESYNC and kernel.problem():
            kernel.attach()
        return replace(report, operations=report.operations + operations)

    def reset_connections(self, family: Family, is_removed: IsRemoved) -> int:
        return self.base.reset_connections(family, is_removed) + reset_connections(family, is_removed)

    def wants_relays(self, family: Family, protocol: Protocol) -> bool:
        """Return whether programs leave sockets to the rules: all of them, or connected ones of UDP."""
        left = self._kernel is None or (protocol is Protocol.UDP and not self._settings.connected_udp)
        return left and self.base.wants_relays(family, protocol)

    def serves_on_loopback(self, node: NodeView, address: Address, protocol: Protocol) -> bool:
        """Return whether programs translate such sockets of the node; the base's answer for all others."""
        by_programs = address == node.family.loopback and (
            protocol is Protocol.TCP or (protocol is Protocol.UDP and self._settings.connected_udp))
        return by_programs or self.base.serves_on_loopback(node, address, protocol)

    def render(self, update: Update) -> str:
        """Return the base's rules and this mode's, and the maps as comments."""
        rules = self.base.render(update) or ""
        return rules + render_text(update)

    def preview(self, update: Update) -> Preview:
        maps = preview(update, self._settings)
        rules = self.base.preview(update) or Preview(0, "")
        return Preview(rules.operations + maps.operations, rules.transaction + maps.transaction)

    def explain(self, questions: Sequence[Question], *, live: bool) -> Sequence[KernelSide]:
        """Return the base's rules, behind the map elements that programs use for local sockets."""
        rules = self.base.explain(questions, live=live) or [KernelSide(()) for _ in questions]
        if not live:
            return explain(questions, rules, self._settings, None)
        with pinned_maps(self._settings) as maps:
            if maps is None or not maps.are_in_use:
                return rules
            return explain(questions, rules, self._settings, maps)

    def traffic(self, family: Family) -> Sequence[Connections]:
        return [*(self.base.traffic(family) or ()), *self._counts.read(family)]

    def watch(self, damaged: Damage) -> bool:
        """Watch the programs' links besides the rules."""
        watches = self.base.watch(damaged)
        self._watcher = Watcher(self._look_and_make_room, self._families_served, damaged)
        return watches

    def measure(self) -> list[Measurement]:
        attached = self._kernel is not None and not self._look()[1]
        about = "1 while the BPF programs translate local sockets"
        return [*self.base.measure(), Measurement("kproxy_ebpf_attached", about, "gauge", float(attached))]

    def close(self) -> None:
        """Close descriptors. The pins keep programs and maps at work."""
        if self._watcher is not None:
            self._watcher.close()
        if self._compilation is not None:
            self._compilation.close()
        if self._kernel is not None:
            self._kernel.close()
        self.base.close()

    def _set_up(self, update: Update) -> int:
        """Have programs choose endpoints for *update*, or none at all. Return the number of elements written.

        Programs that an earlier process attached choose from maps that nobody writes until this succeeds.
        """
        if time.monotonic() >= self._retry_at:
            try:
                operations = self._start(update)
            except StillCompiling as error:
                self._left_to_rules(self._trouble or str(error))
            except (OSError, HostError, SyncFailed) as error:
                self._retry_at = time.monotonic() + self._delay
                self._delay = min(2 * self._delay, _LONGEST_DELAY)
                self._left_to_rules(str(error))
            else:
                if self._trouble:
                    log.info("local sockets are translated")
                self._trouble = ""
                return operations
        if not self._is_detached:
            try:
                leave_to_rules(self._settings)
                self._is_detached = True
            except (OSError, SyncFailed) as error:
                log.error("programs may choose removed endpoints", extra={"fields": {"error": str(error)}})
        return 0

    def _start(self, update: Update) -> int:
        """Load the programs, fill the maps and attach; nothing that was opened is kept after a failure.

        Programs of the wheel that the kernel refuses are compiled here. Raises HostError, SyncFailed and
        OSError.
        """
        patience, self._patience = self._patience, _POLL
        if self._compilation is None:
            self._compilation = Compilation()
        try:
            compiled = self._compilation.result(patience)
        except StillCompiling:
            raise
        except HostError:
            self._compilation = None
            raise
        counting = () if not self._counted else names.COUNTING if accounting_enabled() else (names.OUTCOMES,)
        kernel = Kernel(self._settings, counting=counting)
        families = {family: FamilyState(family, kernel) for family in self._families_served}
        try:
            kernel.open(compiled)
        except ProgramRefused as refusal:
            if not self._compilation.are_shipped:
                raise
            self._compile_here(refusal)
            return self._start(update)
        try:
            state = families[update.family]
            operations = state.write(update, state.withdraw(update))
            kernel.attach()  # A family that has no elements yet is served by the rules.
        except Exception:
            kernel.abandon()
            raise
        self._kernel, self._families = kernel, families
        return operations

    def _compile_here(self, refusal: ProgramRefused) -> None:
        """Start the compiler in place of the programs that were built with kproxy. Raises HostError."""
        log.warning("compiling the BPF programs on this machine", extra={"fields": {"error": str(refusal)}})
        try:
            self._compilation = Compilation(shipped=None)
        except HostError as error:
            raise HostError(f"{refusal}; {error}") from error
        self._patience = _PATIENCE

    def _left_to_rules(self, trouble: str) -> None:
        self._is_detached = False
        if trouble != self._trouble:
            log.error("local sockets are left to the rules", extra={"fields": {"error": trouble}})
        self._trouble = trouble

    def _look(self) -> Look:
        if self._kernel is None:
            return 0, ""
        repairs = self._kernel.attachments  # read first: a repair meanwhile must not make an old problem new
        return repairs, self._kernel.problem()

    def _look_and_make_room(self) -> Look:
        if self._kernel is not None:
            try:
                self._kernel.make_room_for_clients()
            except OSError as error:
                log.warning("no more room for clients with session affinity",
                            extra={"fields": {"error": str(error)}})  # fmt: skip
        return self._look()

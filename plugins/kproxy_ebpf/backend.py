"""The backend: maps and programs in front of the base mode's rules.

Its hooks wrap those of the base. The rules serve whatever the programs leave alone, so neither the order of
the two nor a failure of the programs can lose a connection.
"""

import logging
from collections.abc import Generator, Sequence

from kproxy_core.backend import api
from kproxy_core.backend.errors import SyncFailed, TrustLost, Unsupported
from kproxy_core.backend.hookspecs import hookimpl
from kproxy_core.host.conntrack.volumes import are_counted
from kproxy_core.host.errors import HostError
from kproxy_core.host.libnftables.texts import complaint
from kproxy_core.model.address import Family
from kproxy_ebpf import names
from kproxy_ebpf.family import FamilyState
from kproxy_ebpf.inspection.explain import explain
from kproxy_ebpf.inspection.preview import preview
from kproxy_ebpf.inspection.render import render_text
from kproxy_ebpf.inspection.traffic import Counted
from kproxy_ebpf.kernel.pinned import pinned_maps
from kproxy_ebpf.kernel.port import Kernel
from kproxy_ebpf.kernel.programs import Compilation
from kproxy_ebpf.questions.detect import lacking
from kproxy_ebpf.settings import read_settings
from kproxy_ebpf.watch import Look, Watcher

log = logging.getLogger("kproxy.ebpf")


class EbpfBackend:
    """Programs the maps of both families; see `kproxy_core.backend.hookspecs` for the contract."""

    def __init__(self, settings: api.BackendSettings) -> None:
        self._settings = read_settings(settings)
        self._families_served = settings.families
        self._counted = settings.count_traffic
        self._counts = Counted(self._settings)
        self._compilation: Compilation | None = None
        self._kernel: Kernel | None = None
        self._families: dict[object, FamilyState] = {}
        self._watcher: Watcher | None = None
        self._attached = False

    @hookimpl(wrapper=True)
    def kproxy_begin(self) -> Generator[None, bool, bool]:
        """Check the base and the programs' requirements; start the compiler if needed. Raises Unsupported."""
        can_begin = yield
        missing = lacking(self._settings, self._families_served)
        if missing:
            raise Unsupported("; ".join(missing))
        try:
            self._compilation = Compilation()
        except HostError as error:
            raise Unsupported(str(error)) from error
        return can_begin

    @hookimpl(wrapper=True)
    def kproxy_sync(self, update: api.Update) -> Generator[None, api.SyncReport, api.SyncReport]:
        """Withdraw endpoints, have the rules changed, then add endpoints."""
        kernel = self._kernel
        if kernel is None:
            report = yield
            kernel = self._open()
            if kernel is None:
                return report
            state = self._families[update.family]
            difference = state.withdraw(update)
        else:
            state = self._families[update.family]
            difference = state.withdraw(update)
            try:
                report = yield
            except TrustLost:
                state.distrust()
                raise
            except SyncFailed:
                state.restore(difference)
                raise
        try:
            operations = state.write(update, difference)
        except SyncFailed:
            state.distrust()
            raise
        if not self._attached or (update.scope is api.Scope.RESYNC and kernel.problem()):
            kernel.attach()  # A family that has no elements yet is served by the rules.
            self._attached = True
        return api.SyncReport(report.operations + operations, report.detail, report.unserved)

    @hookimpl(wrapper=True)
    def kproxy_render(self, update: api.Update) -> Generator[None, str, str]:
        """Return the base's rules and this mode's, and the maps as comments."""
        rules = yield
        return rules + render_text(update, self._settings.notrack_mark)

    @hookimpl(wrapper=True)
    def kproxy_check_text(self, update: api.Update) -> Generator[None, str | None, str | None]:
        """Have libnftables check the base's rules, and then this mode's."""
        complaint_of_base = yield
        return complaint_of_base or complaint(render_text(update, self._settings.notrack_mark))

    @hookimpl(wrapper=True)
    def kproxy_preview(self, update: api.Update) -> Generator[None, api.Preview, api.Preview]:
        rules = yield
        maps = preview(update, self._settings)
        return api.Preview(rules.operations + maps.operations, rules.transaction + maps.transaction)

    @hookimpl(wrapper=True)
    def kproxy_explain(
        self, questions: Sequence[api.Question], live: bool
    ) -> Generator[None, Sequence[api.KernelSide], Sequence[api.KernelSide]]:
        """Return the base's rules, behind the map elements that programs use for local sockets."""
        rules = yield
        if not live:
            return explain(questions, rules, self._settings, None)
        with pinned_maps(self._settings) as maps:
            if maps is None or not maps.are_in_use:
                return rules
            return explain(questions, rules, self._settings, maps)

    @hookimpl(wrapper=True)
    def kproxy_traffic(
        self, family: Family
    ) -> Generator[None, Sequence[api.Connections], Sequence[api.Connections]]:
        by_rules = yield
        return [*by_rules, *self._counts.read(family)]

    @hookimpl(wrapper=True)
    def kproxy_watch(self, damaged: api.Damage) -> Generator[None, bool, bool]:
        """Watch the programs' links besides the rules."""
        watches = yield
        self._watcher = Watcher(self._look, self._families_served, damaged)
        return watches

    @hookimpl
    def kproxy_measure(self) -> list[api.Measurement]:
        attached = self._attached and not self._look()[1]
        about = "1 while the BPF programs translate local sockets"
        return [api.Measurement("kproxy_ebpf_attached", about, "gauge", float(attached))]

    @hookimpl(wrapper=True)
    def kproxy_close(self) -> Generator[None, None, None]:
        """Close descriptors. The pins keep programs and maps at work."""
        if self._watcher is not None:
            self._watcher.close()
        if self._compilation is not None:
            self._compilation.close()
        if self._kernel is not None:
            self._kernel.close()
        return (yield)

    def _open(self) -> Kernel | None:
        """Return the kernel's maps and programs; None where they cannot be had: the rules serve alone.

        Tried once for each process.
        """
        if self._compilation is None:
            return None
        try:
            compiled = self._compilation.result()
            counting = () if not self._counted else names.COUNTING if are_counted() else (names.OUTCOMES,)
            kernel = Kernel(self._settings, families=self._families_served, counting=counting)
            kernel.open(compiled)
        except (HostError, SyncFailed) as error:
            log.error("local sockets are left to the rules", extra={"fields": {"error": str(error)}})
            self._compilation = None
            return None
        self._kernel = kernel
        self._families = {family: FamilyState(family, kernel) for family in self._families_served}
        return kernel

    def _look(self) -> Look:
        if self._kernel is None:
            return 0, ""
        repairs = self._kernel.attachments  # read first: a repair meanwhile must not make an old problem new
        return repairs, self._kernel.problem()

"""Breaches of the contract, each of which one check of the kit must notice."""

import itertools
import threading
from collections.abc import Generator, Sequence
from typing import Any

from msgspec.structs import replace

from kproxy_core.contract import (
    Backend,
    BackendSettings,
    Caveat,
    Damage,
    Leftovers,
    Scope,
    SyncFailed,
    SyncReport,
    Update,
    hookimpl,
)
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.service import ServicePortKey
from tests.kit.sabotage import Sabotage, nft

Synced = Generator[None, SyncReport, SyncReport]


class MakesOneForAll(Sabotage):
    check, words = "describes-itself", "returned the same backend twice"

    def be_loaded(self) -> None:
        self._made: Backend | None = None

    @hookimpl(wrapper=True)
    def kproxy_make_backend(self) -> Generator[None, Backend, Backend]:
        made = yield
        if self._made is None:
            self._made = made
        return self._made


class ImportsMuch(Sabotage):
    check, words = "loads-quickly", "import asyncio"

    def be_loaded(self) -> None:
        import asyncio

        del asyncio


class DetectsWithATrace(Sabotage):
    check, words = "detects-without-a-trace", "kproxy_detect changed the kernel:\n[+] table ip trace"

    @hookimpl(wrapper=True)
    def kproxy_detect(self) -> Generator[None, object, object]:
        nft("add table ip trace")
        return (yield)


class WarnsOfNobody(Sabotage):
    check, words = "caveats-are-about-the-plans", "a caveat is about some/where, which does not exist"

    @hookimpl
    def kproxy_caveats(self) -> Sequence[Caveat]:
        return [Caveat("something", ServicePortKey("some", "where", "", Protocol.TCP))]


class RendersWithATrace(Sabotage):
    check, words = "renders-without-a-trace", r"render\(\) changed the kernel"

    def spoil(self, backend: Any) -> None:
        render = backend.render

        def with_a_trace(update: Update) -> object:
            nft("add table ip trace")
            return render(update)

        backend.render = with_a_trace


class RendersAtRandom(Sabotage):
    check, words = "renders-the-same-anywhere", "not the same in two processes"

    def spoil(self, backend: Any) -> None:
        render = backend.render
        backend.render = lambda update: f"{render(update)}# {hash('any text')}\n"


class AlarmsItself(Sabotage):
    check, words = "watches-or-says-so", "own syncs were told as damage"

    def __init__(self) -> None:
        self._damaged: Damage | None = None

    def spoil(self, backend: Any) -> None:
        self._damaged = None
        watch = backend.watch

        def watch_all(damaged: Damage) -> bool:
            watch(damaged)
            self._damaged = damaged
            return True

        backend.watch = watch_all

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        if self._damaged is not None:
            self._damaged(update.family, "somebody was here")


class TakesSomeAlong(Sabotage):
    check, words = "close-leaves-the-kernel-alone", r"close\(\) changed the kernel:\n- "

    def spoil(self, backend: Any) -> None:
        backend.close = lambda: nft("delete table ip6 kproxy-plain")


class LeavesAThread(Sabotage):
    check, words = "close-lets-go-of-everything", "there are still: thread forgotten"

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def spoil(self, backend: Any) -> None:
        watch = backend.watch

        def watch_for_long(damaged: Damage) -> object:
            forgotten = threading.Timer(3600, lambda: None)
            forgotten.name, forgotten.daemon = f"forgotten {next(self._numbers)}", True
            forgotten.start()
            return watch(damaged)

        backend.watch = watch_for_long


class PretendsLess(Sabotage):
    check, words = "cleanup-leaves-nothing", "with dry_run it had named"

    @hookimpl(wrapper=True)
    def kproxy_cleanup(self, dry_run: bool) -> Generator[None, list[Leftovers], list[Leftovers]]:
        found = yield
        return [replace(left, removed=left.removed[dry_run:]) for left in found]


class CleansWhatNeverWas(Sabotage):
    check, words = "cleanup-of-nothing-is-quiet", "names .*phantom.* where nothing is"

    def be_loaded(self) -> None:
        self._ran = False

    @hookimpl(tryfirst=True, specname="kproxy_make_backend")
    def start_over(self) -> None:
        self._ran = True

    @hookimpl
    def kproxy_cleanup(self) -> Leftovers:
        return Leftovers(() if self._ran else ("phantom",))


class SparesTheWrongOnes(Sabotage):
    check, words = "cleanup-spares-what-kube-proxy-uses", "only own_only names .*table ip theirs"

    @hookimpl
    def kproxy_cleanup(self, own_only: bool) -> Leftovers:
        return Leftovers(("table ip theirs",) if own_only else ())


class TouchesOthers(Sabotage):
    check, words = "rules-of-others-stay", "a sync removed what somebody else had made"

    @hookimpl(tryfirst=True)
    def kproxy_sync(self) -> None:
        nft("delete table ip kproxy-kit-foreign")


class CanNotRetire(Sabotage):
    check, words = "retires-without-connections-at-once", "kproxy_retire: it is not that easy"

    @hookimpl
    def kproxy_retire(self) -> Leftovers:
        return Leftovers(errors=("it is not that easy",))


# Syncs --------------------------------------------------------------------------------------------


class CountsNothing(Sabotage):
    check, words = "full-sync-writes-and-reports", "reported 0 operations for Services of every kind"

    @hookimpl(wrapper=True)
    def kproxy_sync(self) -> Synced:
        yield
        return SyncReport(0)


class AlwaysBusy(Sabotage):
    """Of a process, every full sync but the first of a family."""

    check, words = "second-full-sync-writes-nothing", "a second full sync .* reports 1 operations"

    def __init__(self) -> None:
        self._synced: set[Family] = set()

    @hookimpl(tryfirst=True, specname="kproxy_make_backend")
    def start_over(self) -> None:
        self._synced.clear()

    @hookimpl(wrapper=True)
    def kproxy_sync(self, update: Update) -> Synced:
        report = yield
        again = update.family in self._synced and update.scope is Scope.RESYNC
        self._synced.add(update.family)
        return SyncReport(report.operations + again)


class WritesTheSameAgain(Sabotage):
    """Every sync writes what the kernel holds already."""

    check, words = "second-full-sync-writes-nothing", "wrote to the kernel: 1 commits to nf_tables"

    @hookimpl(tryfirst=True)
    def kproxy_sync(self) -> None:
        nft("add table ip kproxy-kit-again; delete table ip kproxy-kit-again")


class BusyAtStart(AlwaysBusy):
    """Only the first full sync of a process."""

    check, words = "restart-writes-nothing", "the first full sync of a new process reports 1 operations"

    @hookimpl(wrapper=True)
    def kproxy_sync(self, update: Update) -> Synced:
        report = yield
        first = update.family not in self._synced
        self._synced.add(update.family)
        return SyncReport(report.operations + first)


class BelievesItself(Sabotage):
    """A full sync with the plans of the last sync does nothing."""

    check, words = "damage-is-repaired", "after all rules were flushed"

    def __init__(self) -> None:
        self._last: dict[Family, object] = {}

    @hookimpl(tryfirst=True, specname="kproxy_make_backend")
    def start_over(self) -> None:
        self._last.clear()

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> SyncReport | None:
        wanted = dict(update.plans)
        same = self._last.get(update.family) == wanted
        self._last[update.family] = wanted
        return SyncReport(0) if same and update.scope is Scope.RESYNC and wanted else None


class ForgetsOneOfMany(Sabotage):
    check, words = "changes-end-where-a-full-sync-ends", "changes one after another .* did not end where"

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        gone = [key for key, plan in update.changed.items() if plan is None]
        if update.scope is Scope.CHANGED and len(update.changed) >= 4 and gone:
            assert isinstance(update.changed, dict)
            del update.changed[gone[0]]


class LooksAtAll(Sabotage):
    check, words = (
        "change-costs-what-it-touches",
        "cost [0-9]+ operations beside 3 Services, [0-9]+ beside 60",
    )

    @hookimpl(wrapper=True)
    def kproxy_sync(self, update: Update) -> Synced:
        report = yield
        return SyncReport(report.operations + len(update.plans) * (update.scope is Scope.CHANGED))


class RemembersFailures(Sabotage):
    """Once a sync of this scope has failed, the next of the kind does nothing."""

    check, words = "failed-change-is-not-remembered", "again after it had failed"
    scope = Scope.CHANGED

    def __init__(self) -> None:
        self._failed = False

    @hookimpl(tryfirst=True, specname="kproxy_make_backend")
    def start_over(self) -> None:
        self._failed = False

    @hookimpl(tryfirst=True, specname="kproxy_sync")
    def forestall(self, update: Update) -> SyncReport | None:
        nothing, self._failed = self._failed and update.scope is self.scope, False
        return SyncReport(0) if nothing else None

    @hookimpl(wrapper=True)
    def kproxy_sync(self, update: Update) -> Synced:
        try:
            return (yield)
        except SyncFailed:
            self._failed = True
            raise


class RemembersFullFailures(RemembersFailures):
    check, words = "failed-full-sync-is-not-remembered", "a full sync after one that had failed"
    scope = Scope.RESYNC


class IgnoresTheNode(Sabotage):
    check, words = "node-changes-are-followed", "a change of the node did not end where"

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> SyncReport | None:
        return SyncReport(0) if update.node_changed and update.scope is Scope.CHANGED else None


class ConfusesFamilies(Sabotage):
    """The last Service of one family takes the rules of the other along."""

    check, words = (
        "families-are-apart",
        "removing every IPv. Service and adding it again changed something else",
    )

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        if not update.plans and update.scope is Scope.CHANGED:
            nft(f"flush table {'ip6' if update.family is Family.IPV4 else 'ip'} kproxy-plain")


class WantsBothFamilies(Sabotage):
    check, words = "one-family-is-enough", "must be two"

    @hookimpl(tryfirst=True, specname="kproxy_make_backend")
    def start_over(self, settings: BackendSettings) -> None:
        if len(settings.families) != 2:
            raise ValueError("families: must be two")


class LosesWhatMoves(Sabotage):
    """Of two service ports of which one takes over from the other, neither is served."""

    check, words = (
        "service-may-change-its-ports",
        "moved frontends from one service port to another did not end",
    )

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        states = sorted(update.changed.items(), key=lambda item: item[1] is None)
        moves = [key.name in ("web", "shop") and plan is None for key, plan in states] == [False, True]
        if update.scope is Scope.CHANGED and moves:
            assert isinstance(update.changed, dict)
            del update.changed[states[0][0]]


class LeavesAChain(Sabotage):
    """For each service port of UDP that goes, a chain stays."""

    check, words = "takes-udp", "left .* or took along"

    @hookimpl(wrapper=True)
    def kproxy_sync(self, update: Update) -> Synced:
        report = yield
        for key, plan in update.changed.items():
            if plan is None and key.protocol is Protocol.UDP and not key.port_name:
                ip = "ip" if update.family is Family.IPV4 else "ip6"
                nft(f"add chain {ip} kproxy-plain left/{key.name}")
        return report


QUESTIONS: tuple[Sabotage, ...] = (
    MakesOneForAll(),
    ImportsMuch(),
    DetectsWithATrace(),
    WarnsOfNobody(),
    RendersWithATrace(),
    AlarmsItself(),
    LeavesAThread(),
    PretendsLess(),
    TouchesOthers(),
    CanNotRetire(),
    CountsNothing(),
    BelievesItself(),
)
MORE_QUESTIONS: tuple[Sabotage, ...] = (
    RendersAtRandom(),
    TakesSomeAlong(),
    SparesTheWrongOnes(),
    CleansWhatNeverWas(),
    AlwaysBusy(),
    ForgetsOneOfMany(),
    RemembersFailures(),
    RemembersFullFailures(),
    WantsBothFamilies(),
    ConfusesFamilies(),
    LeavesAChain(),
)
SYNCS: tuple[Sabotage, ...] = (
    BusyAtStart(),
    WritesTheSameAgain(),
    LooksAtAll(),
    IgnoresTheNode(),
    LosesWhatMoves(),
)

"""Checks of syncs: idempotent, proportional, atomic, and with the same result by any path."""

import random
from dataclasses import replace
from functools import partial

from kproxy_conformance.builders import endpoint_slice, node_view, plans, service
from kproxy_conformance.checks import kernel_state
from kproxy_conformance.checks.bench import Bench
from kproxy_conformance.checks.check import Check, Checks, Failed, NotApplicable, expect
from kproxy_conformance.checks.features import ADDRESSES, FEATURES, Feature, Plans, everything, many
from kproxy_conformance.checks.kernel_state import difference
from kproxy_conformance.checks.privileges import without_privileges
from kproxy_conformance.checks.subject import change, full
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.values import SyncReport
from kproxy_core.model.address import Family

CHECKS = Checks()
_WALKS = 2
_STEPS = 6


@CHECKS.each_family
def full_sync_writes_and_reports(bench: Bench) -> None:
    """The first full sync programs what it is given, and returns a SyncReport that counts it."""
    report = full(bench.subject.start(), bench.family, everything(bench.family))
    expect(isinstance(report, SyncReport), f"sync() returned {type(report).__name__}, not SyncReport")
    expect(
        report.operations > 0,
        f"sync() reported {report.operations} operations for Services of every kind",
    )
    expect(
        bench.state() != bench.untouched,
        "after a full sync with Services of every kind there is nothing in the kernel; "
        "if the backend keeps its state elsewhere, name commands that print it in kproxy_state",
    )


@CHECKS.each_family
def second_full_sync_writes_nothing(bench: Bench) -> None:
    """A full sync that finds no differences writes nothing, and reports 0 operations."""
    wanted = everything(bench.family)
    instance = bench.started(wanted)
    before, commits = bench.state(), kernel_state.commits()
    report = full(instance, bench.family, wanted)
    bench.unwritten(commits, "a second full sync with the same plans wrote to the kernel")
    bench.same(before, "a second full sync with the same plans changed the kernel")
    expect(
        report.operations == 0,
        f"a second full sync with the same plans reports {report.operations} operations",
    )


@CHECKS.each_family
def restart_writes_nothing(bench: Bench) -> None:
    """A process that starts over existing rules disturbs nothing: it reads them, and reports 0 operations."""
    wanted = everything(bench.family)
    instance = bench.started(wanted)
    before = bench.state()
    bench.subject.end(instance)
    report = full(bench.subject.start(), bench.family, wanted)
    bench.same(before, "the first full sync of a new process with the same plans changed the kernel")
    expect(
        report.operations == 0, f"the first full sync of a new process reports {report.operations} operations"
    )


@CHECKS.each_family
def damage_is_repaired(bench: Bench) -> None:
    """A full sync reads the kernel, and restores whatever another process destroyed."""
    wanted = everything(bench.family)
    instance = bench.started(wanted)
    before = bench.state()
    bench.destroy()
    full(instance, bench.family, wanted)
    bench.as_much(before, "a full sync after all rules were flushed left them different from before")


@CHECKS.each_family
def changes_end_where_a_full_sync_ends(bench: Bench) -> None:
    """Any order and batching of changes ends where one full sync with the final plans ends."""
    family = bench.family
    for seed in range(_WALKS):
        chance = random.Random(seed)
        held: dict[str, Plans] = {}
        instance = bench.started({})
        for _ in range(_STEPS):
            before = _all(held)
            for feature in chance.sample(FEATURES, 4):
                if feature.name in held and chance.random() < 0.4:
                    del held[feature.name]
                else:
                    held[feature.name] = feature.plans(family, others=chance.random() < 0.5)
            after = _all(held)
            changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
            change(instance, family, after, changed)
        walked = bench.state()
        final = _all(held)
        bench.settled(instance, final, f"{_STEPS} changes one after another (walk {seed})")
        bench.subject.end(instance)
        left = bench.subject.cleanup()
        expect(not left.errors, f"kproxy_cleanup: {'; '.join(left.errors)}")
        instance = bench.started(final)
        bench.as_much(
            walked, f"only changes (-), or only a full sync with the same plans (+), makes (walk {seed})"
        )
        bench.subject.end(instance)
        bench.subject.cleanup()


@CHECKS.each_family
def change_costs_what_it_touches(bench: Bench) -> None:
    """The cost of a change does not grow with the number of other Services."""
    family = bench.family
    one = FEATURES[0]
    costs = []
    for count in (3, 60):
        beside = many(count, family)
        instance = bench.started(beside | one.plans(family))
        after = beside | one.plans(family, others=True)
        costs.append(change(instance, family, after, one.plans(family)).operations)
        full(instance, family, {})
        bench.subject.end(instance)
    expect(
        costs[0] == costs[1],
        f"new endpoints for one Service cost {costs[0]} operations beside 3 Services, {costs[1]} beside 60",
    )


@CHECKS.each_family
def failed_change_is_not_remembered(bench: Bench) -> None:
    """A sync that the kernel refuses raises SyncFailed and remembers nothing: the next one does all of it."""
    family = bench.family
    first, second = FEATURES[0].plans(family), FEATURES[8].plans(family)
    instance = bench.started(first)
    before = bench.state()
    _refused(partial(change, instance, family, first | second, second), bench, instance, first | second)
    bench.same(before, "a sync that failed changed the kernel")
    change(instance, family, first | second, second)
    bench.settled(instance, first | second, "a change, again after it had failed,")


@CHECKS.each_family
def failed_full_sync_is_not_remembered(bench: Bench) -> None:
    """A full sync that the kernel refuses remembers nothing: the next one does everything."""
    family = bench.family
    wanted, added = FEATURES[0].plans(family), FEATURES[8].plans(family)
    instance = bench.started({})
    _refused(partial(full, instance, family, wanted), bench, instance, wanted)
    full(instance, family, wanted)
    change(instance, family, wanted | added, added)
    bench.settled(instance, wanted | added, "a full sync after one that had failed, and a change,")


def _refused(sync: partial[SyncReport], bench: Bench, instance: BackendInstance, plans: Plans) -> None:
    """Run *sync* without privileges, so that the kernel refuses; check the exception."""
    try:
        with without_privileges():
            sync()
    except SyncFailed:
        return
    except Exception as error:
        raise Failed(
            f"sync() raised {type(error).__name__}, not SyncFailed, when the kernel refused: {error}"
        ) from error
    bench.settled(instance, plans, "a sync that was refused every privilege reported success, and")
    raise NotApplicable("it needs no privileges, so the kit can't make a sync fail")


@CHECKS.each_family
def node_changes_are_followed(bench: Bench) -> None:
    """A change of the node alone (its addresses, local sources, masquerading) reaches all rules."""
    family, wanted = bench.family, everything(bench.family)
    at = ADDRESSES[family]
    instance = bench.started(wanted)
    moved = node_view(
        "node1", family=family, pods=f"{at.far}/{at.bits}", ip=at.node, masquerade_all=True,
        node_port_addresses=f"{at.node} {at.external_ip(250)}",
        service_cidrs=f"{at.cluster_ip(0)}/{at.bits - 8}",
    )  # fmt: skip
    change(instance, family, wanted, (), moved)
    bench.settled(instance, wanted, "a change of the node", moved)


@CHECKS.once
def families_are_apart(bench: Bench) -> None:
    """A sync of one IP family leaves the other alone."""
    for family, other in ((Family.IPV4, Family.IPV6), (Family.IPV6, Family.IPV4)):
        instance = bench.started(everything(family), family)
        full(instance, other, everything(other))
        before = bench.state()
        change(instance, other, {}, everything(other))
        full(instance, other, everything(other))
        bench.as_much(
            before, f"removing every {other.label} Service and adding it again changed something else"
        )
        bench.subject.end(instance)
        bench.subject.cleanup()


@CHECKS.once
def one_family_is_enough(bench: Bench) -> None:
    """A backend made for one IP family only serves that one, as on a single-stack machine."""
    from kproxy_conformance.checks.subject import Subject

    for family in Family:
        subject = Subject(bench.wanted, [family])
        instance = subject.start()
        full(instance, family, everything(family))
        subject.end(instance)
        left = subject.cleanup()
        expect(not left.errors, f"kproxy_cleanup: {'; '.join(left.errors)}")


@CHECKS.each_family
def service_may_change_its_ports(bench: Bench) -> None:
    """Frontends may move between service ports in one change: a renamed port, a reassigned address."""
    family = bench.family
    at = ADDRESSES[family]

    def web(port: str, name: str) -> Plans:
        made = service(name, f"{port}:80@30150", ip=at.cluster_ip(50), external_ips=at.external_ip(50))
        return plans(at.view(), made, endpoint_slice(name, at.near[0], ports=[f"{port}:8080"], family=family))

    before, renamed, moved = web("http", "web"), web("www", "web"), web("www", "shop")
    instance = bench.started(before)
    for old, new in ((before, renamed), (renamed, moved), (moved, before)):
        change(instance, family, new, {**old, **new})
        bench.settled(instance, new, "a change that moved frontends from one service port to another")


def _feature(feature: Feature, bench: Bench) -> None:
    family = bench.family
    beside = many(2, family)
    instance = bench.started(beside)
    states = []
    for turn in (feature, replace(feature, name=f"next-{feature.name}", number=feature.number + 40)):
        for others in (False, True):
            wanted = turn.plans(family, others=others)
            change(instance, family, beside | wanted, wanted)
        change(instance, family, beside, turn.plans(family))
        states.append(bench.state())
    # Leftovers of one Service may be kept for others of its kind; those of every Service would accumulate.
    if changes := difference(states[0].lines, states[1].lines):
        raise Failed(f"a Service that came and went ({feature.name}) left (+) or took along (-):\n{changes}")
    for others, how in ((False, "added"), (True, "with other endpoints")):
        wanted = feature.plans(family, others=others)
        change(instance, family, beside | wanted, wanted)
        bench.settled(instance, beside | wanted, f"{feature.name} {how}")


CHECKS += [
    Check(
        f"takes-{feature.name}",
        f"A Service of this kind ({feature.name}) can be added, changed and removed without a trace.",
        partial(_feature, feature),
    )
    for feature in FEATURES
]


def _all(held: dict[str, Plans]) -> Plans:
    return {key: plan for found in held.values() for key, plan in found.items()}

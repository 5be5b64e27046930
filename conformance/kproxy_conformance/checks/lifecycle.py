"""Checks beyond syncs: questions, rendering, watching, closing, and clean-up."""

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from kproxy_conformance.builders import full_update
from kproxy_conformance.checks import kernel_state, rendering
from kproxy_conformance.checks.bench import Bench
from kproxy_conformance.checks.check import Checks, Failed, NotApplicable, expect
from kproxy_conformance.checks.features import ADDRESSES, FEATURES, everything
from kproxy_conformance.checks.subject import change, deaf, full, render
from kproxy_conformance.network.namespaces import run
from kproxy_conformance.network.patience import patience
from kproxy_conformance.open_files import open_files
from kproxy_conformance.processes import children
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.values import CONTRACT, Caveat, Detection, Leftovers
from kproxy_core.model.address import Family

CHECKS = Checks()

PATIENCE = 5.0
"""Seconds until a backend that watches has noticed damage, multiplied by `patience`."""

RETIRED_WITHIN = 20.0
"""Seconds until a backend without connections has retired, multiplied by `patience`."""

_Seen = TypeVar("_Seen")
_FOREIGN = "kproxy-kit-foreign"


@CHECKS.once
def describes_itself(bench: Bench) -> None:
    """The description names this mode, has a one-line summary and a supported contract as a literal.

    Each call of kproxy_make_backend makes a new backend: a switch of modes may need two.
    """
    described = bench.subject.registry.load(bench.subject.mode)
    summary = described.summary
    expect(0 < len(summary) <= 80 and "\n" not in summary, f"the summary is no short line: {summary!r}")
    expect(
        described.contract <= CONTRACT, f"the contract is {described.contract!r}, this kproxy's is {CONTRACT}"
    )
    one, other = bench.subject.start(), bench.subject.start()
    expect(one.backend is not other.backend, "kproxy_make_backend returned the same backend twice")


@CHECKS.once
def loads_quickly(bench: Bench) -> None:
    """Loading and describing the plugin imports nothing heavy: every start of kproxy would pay for it."""
    imported = set(rendering.in_another_process(bench.wanted, "imports", {}).split())
    heavy = sorted(imported & rendering.HEAVY)
    expect(not heavy, f"loading the plugin and kproxy_describe import {', '.join(heavy)}")


@CHECKS.once
def detects_without_a_trace(bench: Bench) -> None:
    """Detection reports each requirement, and changes nothing."""
    found = bench.subject.registry.detect(bench.subject.mode, bench.subject.settings)
    expect(isinstance(found, Detection), f"kproxy_detect returned {type(found).__name__}, not Detection")
    expect(found.mode == bench.subject.mode, f"kproxy_detect answered for mode {found.mode!r}")
    for requirement in found.requirements:
        expect(
            requirement.what and requirement.found,
            f"a requirement does not say what was found: {requirement}",
        )
        expect(
            requirement.met or requirement.remedy, f"{requirement.what} is not met, and no remedy is given"
        )
    expect(found.usable, f"the mode does not work here, so it cannot be checked: {found.because}")
    bench.same(bench.untouched, "kproxy_detect changed the kernel")


@CHECKS.each_family
def caveats_are_about_the_plans(bench: Bench) -> None:
    """Caveats name service ports of the update only, and computing them changes nothing."""
    update = full_update(ADDRESSES[bench.family].view(), everything(bench.family))
    subject = bench.subject
    for caveat in subject.registry.caveats(subject.mode, update, subject.settings):
        expect(isinstance(caveat, Caveat), f"kproxy_caveats returned a {type(caveat).__name__}, not Caveat")
        expect(caveat.what, "a caveat does not say what it is about")
        if caveat.service_port is not None:
            expect(
                caveat.service_port in update.plans,
                f"a caveat is about {caveat.service_port}, which does not exist",
            )
    bench.same(bench.untouched, "kproxy_caveats changed the kernel")


@CHECKS.each_family
def renders_without_a_trace(bench: Bench) -> None:
    """Rendering works before and after a sync, and changes neither the kernel nor the backend's memory."""
    family, wanted = bench.family, everything(bench.family)
    instance = bench.subject.start()
    text = render(instance, family, wanted)
    expect(text.strip(), "render() returned no text")
    bench.same(bench.untouched, "making a backend and render() changed the kernel")
    full(instance, family, wanted)
    before = bench.state()
    expect(render(instance, family, wanted) == text, "render() returns something else after a sync")
    render(instance, family, {})
    bench.same(before, "render() changed the kernel")
    added = FEATURES[0].plans(family, others=True)
    change(instance, family, wanted | added, added)
    bench.settled(instance, wanted | added, "a change after render()")


@CHECKS.each_family
def renders_the_same_anywhere(bench: Bench) -> None:
    """Another process, without privileges, renders the same text from the same plans."""
    family, wanted = bench.family, everything(bench.family)
    text = render(bench.subject.start(), family, wanted)
    other = rendering.in_another_process(bench.wanted, family.label, {"PYTHONHASHSEED": "7"})
    if other != text:
        pairs = zip(text.splitlines(), other.splitlines(), strict=False)
        first = next((f"{one!r} and {two!r}" for one, two in pairs if one != two), "their lengths")
        raise Failed(f"render() is not the same in two processes; they differ first in {first}")


@CHECKS.each_family
def keeps_its_base_at_work(bench: Bench) -> None:
    """A mode that builds on another one programs and renders everything that its base does."""
    subject, family, wanted = bench.subject, bench.family, everything(bench.family)
    base = subject.registry.load(subject.mode).base
    if not base:
        raise NotApplicable("it builds on no other mode")
    alone = subject.start(base)
    text = render(alone, family, wanted)
    full(alone, family, wanted)
    programmed = bench.state()
    subject.end(alone)
    subject.cleanup()
    instance = bench.started(wanted)
    lost = Counter(programmed.shape) - Counter(bench.state().shape)
    expect(not lost, f"the kernel lacks what {base} alone programs, such as {min(lost, default='')!r}")
    lost = Counter(text.splitlines()) - Counter(render(instance, family, wanted).splitlines())
    expect(not lost, f"render() lacks what {base} alone renders, such as {min(lost, default='')!r}")


@CHECKS.each_family
def watches_or_says_so(bench: Bench) -> None:
    """A watch reports foreign changes only; a backend that cannot watch returns False."""
    family, wanted = bench.family, everything(bench.family)
    instance = bench.started(wanted)
    told: list[tuple[Family, str]] = []
    noticed = threading.Event()

    def damaged(family: Family, what: str) -> None:
        told.append((family, what))
        noticed.set()

    if not instance.watch(damaged):
        raise NotApplicable("watch() says that it can't tell")
    less = dict(list(wanted.items())[5:])
    change(instance, family, less, wanted)
    change(instance, family, wanted, wanted)
    full(instance, family, wanted)
    noticed.wait(0.3)
    expect(not told, f"the backend's own syncs were told as damage: {told[:1]}")
    bench.destroy()
    seconds = PATIENCE * patience()
    expect(noticed.wait(seconds), f"all rules were flushed, and nobody was told within {seconds:.0f} s")
    expect(told[0][0] in Family and told[0][1], f"damage is told without family or words: {told[0]}")


@CHECKS.once
def close_leaves_the_kernel_alone(bench: Bench) -> None:
    """Closing leaves the rules in place, so that connections survive until the next process."""
    instance = _both(bench)
    instance.watch(deaf)
    before = bench.state()
    bench.subject.end(instance)
    bench.same(before, "close() changed the kernel")


@CHECKS.once
def close_lets_go_of_everything(bench: Bench) -> None:
    """Closing releases the backend's threads, processes and open files."""
    bench.subject.end(_both(bench))  # Resources created once, such as those of a library, may be kept.
    before = _held()
    instance = _both(bench)
    instance.watch(deaf)
    bench.subject.end(instance)
    left = _until(lambda: [*(_held() - before)], lambda found: not found)
    expect(not left, f"after close() there are still: {', '.join(sorted(left))}")


@CHECKS.once
def cleanup_leaves_nothing(bench: Bench) -> None:
    """A dry run lists all objects and changes nothing; clean-up removes exactly those, once."""
    bench.subject.end(_both(bench))
    before = bench.state()
    listed = _cleaned(bench, dry_run=True)
    bench.same(before, "kproxy_cleanup with dry_run changed the kernel")
    expect(
        listed.removed or before == bench.untouched,
        "kproxy_cleanup with dry_run names nothing, though there are rules for every Service",
    )
    removed = _cleaned(bench)
    bench.same(bench.untouched, "kproxy_cleanup left (+) or took along (-)")
    expect(
        removed.removed == listed.removed,
        f"kproxy_cleanup removed {removed.removed}, with dry_run it had named {listed.removed}",
    )
    again = _cleaned(bench)
    expect(not again.removed, f"a second kproxy_cleanup still removes {again.removed}")


@CHECKS.once
def cleanup_of_nothing_is_quiet(bench: Bench) -> None:
    """Clean-up does nothing and reports no errors if the mode never ran."""
    for dry_run in (True, False):
        found = _cleaned(bench, dry_run=dry_run)
        expect(not found.removed, f"kproxy_cleanup names {found.removed} where nothing is")
    bench.same(bench.untouched, "kproxy_cleanup where the mode never ran changed")


@CHECKS.once
def cleanup_spares_what_kube_proxy_uses(bench: Bench) -> None:
    """With own_only, clean-up removes nothing that a full clean-up would keep."""
    bench.subject.end(_both(bench))
    before = bench.state()
    everything_listed = set(_cleaned(bench, dry_run=True).removed)
    own = set(bench.subject.cleanup(dry_run=True, own_only=True).removed)
    bench.same(before, "kproxy_cleanup with dry_run and own_only changed the kernel")
    expect(own <= everything_listed, f"only own_only names {own - everything_listed}")


@CHECKS.once
def rules_of_others_stay(bench: Bench) -> None:
    """Neither a sync nor a clean-up touches foreign objects."""
    run("ip", "link", "add", "foreign", "type", "veth", "peer", "name", "foreign-peer")
    run("ip", "address", "add", "192.0.2.99/32", "dev", "foreign")
    kernel_state.block_as_others_do(_FOREIGN, "192.0.2.98")
    before = bench.state()
    bench.subject.end(_both(bench))
    there = set(bench.state().lines)
    gone = [line for line in before.lines if line not in there]
    expect(not gone, "a sync removed what somebody else had made:\n" + "\n".join(gone[:10]))
    _cleaned(bench)
    bench.same(before, "kproxy_cleanup changed what somebody else had made")


@CHECKS.once
def retires_without_connections_at_once(bench: Bench) -> None:
    """A retired backend without connections waits for none, and leaves nothing behind."""
    instance = _both(bench)
    left = _until(lambda: bench.subject.retire(instance), lambda found: not found.is_needed, RETIRED_WITHIN)
    expect(not left.errors, f"kproxy_retire: {'; '.join(left.errors)}")
    expect(not left.is_needed, f"kproxy_retire waits for {left.waiting} connections, and there was none")
    bench.subject.end(instance)
    _cleaned(bench)
    bench.same(bench.untouched, "kproxy_retire, close() and kproxy_cleanup left (+) or took along (-)")


def _both(bench: Bench) -> BackendInstance:
    """Return a backend that has programmed every feature in both families."""
    instance = bench.started(everything(Family.IPV4), Family.IPV4)
    full(instance, Family.IPV6, everything(Family.IPV6))
    return instance


def _cleaned(bench: Bench, *, dry_run: bool = False) -> Leftovers:
    found = bench.subject.cleanup(dry_run=dry_run)
    expect(not found.errors, f"kproxy_cleanup: {'; '.join(found.errors)}")
    return found


def _held() -> set[str]:
    """Return the threads, child processes and open files of this process, by description."""
    found = {f"thread {thread.name}" for thread in threading.enumerate()}
    found |= {f"process {pid}" for pid in children(os.getpid())}
    files: dict[str, int] = {}
    for name in open_files(os.getpid()).values():
        kind = re.sub(r"\d+", "N", name)
        files[kind] = files.get(kind, 0) + 1
        found.add(f"file {kind} ({files[kind]})")
    return found


def _until(look: Callable[[], _Seen], enough: Callable[[_Seen], bool], seconds: float = PATIENCE) -> _Seen:
    """Call *look* until its result is *enough*, for *seconds* times `patience`; return the last result."""
    until = time.monotonic() + seconds * patience()
    while not enough(seen := look()) and time.monotonic() < until:
        time.sleep(0.05)
    return seen

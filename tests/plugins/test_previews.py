"""The operations that a mode says it would make are those that it makes, and do what they should."""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from msgspec import structs

from kproxy_conformance.builders import full_update
from kproxy_conformance.checks.bench import lonely_node
from kproxy_conformance.checks.features import ADDRESSES, Plans, everything
from kproxy_conformance.checks.subject import Subject, Wanted, full
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.values import Preview
from kproxy_core.model.address import Family
from tests.core.bpf_places import new_bpf_file_system, new_cgroup

FAMILIES = pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
WRITERS = {
    ("nftables", Family.IPV4): "nft -f -", ("nftables", Family.IPV6): "nft -f -",
    ("iptables", Family.IPV4): "iptables-restore --noflush",
    ("iptables", Family.IPV6): "ip6tables-restore --noflush",
}  # fmt: skip


@pytest.fixture
def options(mode: str, tmp_path: Path) -> Iterator[Mapping[str, object]]:
    """Those that confine BPF programs: they outlive the namespace, and would translate sockets of others."""
    if mode != "ebpf":
        yield {}
        return
    with new_cgroup() as cgroup, new_bpf_file_system(tmp_path / "bpf") as pins:
        yield {"cgroup": str(cgroup), "pinDirectory": str(pins / "kproxy")}


@pytest.fixture
def instance(mode: str, family: Family, options: Mapping[str, object]) -> Iterator[BackendInstance]:
    """A backend on a node of its own."""
    with lonely_node():
        subject = Subject(Wanted(mode, options=options), (family,))
        try:
            yield subject.start()
        finally:
            subject.end_all()
            subject.cleanup()


def preview(instance: BackendInstance, family: Family, plans: Plans) -> Preview:
    found = instance.preview(full_update(ADDRESSES[family].view(), plans))
    assert found is not None
    return found


def fewer(plans: Plans) -> Plans:
    """Return *plans* without some, and with others changed."""
    kept = dict(list(plans.items())[2:])
    first, *_ = (key for key, plan in kept.items() if len(plan.cluster) > 1)
    return {**kept, first: structs.replace(kept[first], cluster=kept[first].cluster[:-1])}


@FAMILIES
@pytest.mark.parametrize("mode", ["nftables", "iptables", "ebpf"])
def test_a_preview_counts_the_operations_of_the_next_sync(
    mode: str, family: Family, instance: BackendInstance
) -> None:
    plans = everything(family)
    full(instance, family, {})  # Counters and maps are created by the first sync.
    for wanted in (plans, fewer(plans), plans):
        seen = preview(instance, family, wanted)
        assert seen.operations == full(instance, family, wanted).operations > 0
        assert seen.transaction
        assert preview(instance, family, wanted) == Preview(0, "")


@pytest.mark.parametrize(("mode", "family"), WRITERS)
def test_the_text_of_a_preview_brings_the_kernel_to_the_plans(
    mode: str, family: Family, instance: BackendInstance
) -> None:
    plans = everything(family)
    for wanted in (plans, fewer(plans)):
        text = preview(instance, family, wanted).transaction
        subprocess.run(WRITERS[mode, family].split(), input=text, text=True, check=True)
        assert preview(instance, family, wanted) == Preview(0, "")


@FAMILIES
@pytest.mark.parametrize("mode", ["userspace"])
def test_a_preview_of_the_userspace_mode_counts_a_start(
    mode: str, family: Family, instance: BackendInstance
) -> None:
    seen = preview(instance, family, everything(family))
    assert seen.operations > 0
    assert seen.transaction

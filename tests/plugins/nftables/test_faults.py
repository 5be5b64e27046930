"""The backend survives what a busy kernel does: lost answers, lost notifications, interrupted dumps."""

import errno
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from kproxy_conformance.builders import endpoint_slice, node_view, plans, service
from kproxy_core.contract.errors import SyncFailed, TrustLost
from kproxy_core.contract.values import BackendSettings, Scope, SyncReport, Update
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.nft import fake
from kproxy_core.nft.fake import FakeKernel
from kproxy_core.nft.messages import GETCHAIN, GETRULE, GETSET, GETTABLE, NEWSETELEM
from kproxy_core.nft.objects import Table
from kproxy_core.nft.transaction import RulesetSocket
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_nftables import names
from kproxy_nftables.backend import NftablesBackend
from kproxy_nftables.kernel import Kernel
from tests.patience import PATIENCE

NODE = node_view("node1", pods="10.244.1.0/24")
WEB = plans(NODE, service("web"), endpoint_slice("web", "10.244.1.1"))
MORE = plans(NODE, service("more", ip="10.96.0.2"), endpoint_slice("more", "10.244.1.2"))
BOTH = {**WEB, **MORE}

Plans = dict[ServicePortKey, ServicePlan]


@pytest.fixture
def kernel() -> Iterator[FakeKernel]:
    with FakeKernel() as made:
        yield made


@pytest.fixture
def backend(kernel: FakeKernel) -> Iterator[NftablesBackend]:
    made = NftablesBackend(BackendSettings(families=(Family.IPV4,)))
    yield made
    made.close()


def resync(backend: NftablesBackend, wanted: Plans) -> SyncReport:
    return backend.sync(Update(NODE.family, Scope.RESYNC, NODE, dict(wanted), wanted))


def change(backend: NftablesBackend, changed: Plans) -> SyncReport:
    return backend.sync(Update(NODE.family, Scope.CHANGED, NODE, dict(changed), {}))


def vips() -> set[bytes]:
    kernel = Kernel()
    try:
        return set(kernel.elements(Family.IPV4, names.VIPS))
    finally:
        kernel.close()


def assert_repaired(backend: NftablesBackend, wanted: Plans) -> None:
    """Assert that a full sync brings the kernel to *wanted*, and that a fresh process finds nothing to do."""
    resync(backend, wanted)
    assert len(vips()) == len(wanted)
    again = NftablesBackend(BackendSettings(families=(Family.IPV4,)))
    try:
        assert resync(again, wanted).operations == 0
    finally:
        again.close()


def test_a_restart_over_a_correct_table_writes_nothing(kernel: FakeKernel, backend: NftablesBackend) -> None:
    assert_repaired(backend, BOTH)
    written = kernel.requests[fake.BATCH_END]
    assert_repaired(backend, BOTH)
    assert kernel.requests[fake.BATCH_END] == written


def test_an_acknowledgement_that_is_lost_does_not_count_as_written(
    kernel: FakeKernel, backend: NftablesBackend
) -> None:
    resync(backend, WEB)
    kernel.lose_answers(kind=fake.BATCH_BEGIN)
    with pytest.raises(SyncFailed):
        change(backend, MORE)
    assert len(vips()) == 2, "the kernel had run it"
    assert_repaired(backend, BOTH)


@pytest.mark.parametrize("kind", [GETTABLE, GETCHAIN, GETRULE, GETSET])
@pytest.mark.parametrize("after", [0, 1])
def test_a_read_that_loses_answers_is_no_reason_to_write(
    kernel: FakeKernel, backend: NftablesBackend, kind: int, after: int
) -> None:
    resync(backend, WEB)
    written = kernel.requests[fake.BATCH_END]
    kernel.lose_answers(kind=kind, after=after)
    restarted = NftablesBackend(BackendSettings(families=(Family.IPV4,)))
    try:
        with pytest.raises(SyncFailed):
            resync(restarted, WEB)
        assert kernel.requests[fake.BATCH_END] == written
        assert resync(restarted, WEB).operations == 0
    finally:
        restarted.close()


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOENT, errno.EEXIST, errno.ENOMEM, errno.EPERM])
@pytest.mark.parametrize("after", [0, 1])
def test_a_refused_change_leaves_the_kernel_as_it_was_and_is_repaired(
    kernel: FakeKernel, backend: NftablesBackend, code: int, after: int
) -> None:
    resync(backend, WEB)
    kernel.refuse(code, kind=NEWSETELEM, after=after)
    with pytest.raises(SyncFailed):
        change(backend, MORE)
    assert len(vips()) == 1
    assert_repaired(backend, BOTH)


def test_busy_transactions_fail_until_the_kernel_is_free(
    kernel: FakeKernel, backend: NftablesBackend
) -> None:
    resync(backend, WEB)
    kernel.refuse(errno.EBUSY, kind=fake.BATCH_BEGIN, times=3)
    for _ in range(3):
        with pytest.raises(SyncFailed):
            change(backend, MORE)
    assert_repaired(backend, BOTH)


def test_a_dump_that_a_commit_interrupts_is_repeated(kernel: FakeKernel, backend: NftablesBackend) -> None:
    resync(backend, WEB)
    kernel.interrupt(4)
    assert resync(backend, WEB).operations == 0


def test_dumps_that_are_always_interrupted_cost_the_trust_and_nothing_else(
    kernel: FakeKernel, backend: NftablesBackend
) -> None:
    resync(backend, WEB)
    kernel.interrupt(5)
    with pytest.raises(TrustLost):
        resync(backend, BOTH)
    assert len(vips()) == 1
    assert_repaired(backend, BOTH)


def test_lost_notifications_count_as_damage_of_every_family(
    kernel: FakeKernel, backend: NftablesBackend
) -> None:
    resync(backend, WEB)
    reports = SimpleQueue[str]()
    backend.watch(lambda _, what: reports.put(what))
    kernel.lose_notifications()
    with RulesetSocket.open() as other:
        other.run([Table(Family.IPV4, "another").create()])
    assert reports.get(timeout=PATIENCE) == "notifications were lost"


def test_a_table_that_another_process_deletes_is_noticed_and_written_again(backend: NftablesBackend) -> None:
    resync(backend, WEB)
    reports = SimpleQueue[str]()
    backend.watch(lambda _, what: reports.put(what))
    with RulesetSocket.open() as other:
        other.run([Table(Family.IPV4, names.TABLE).delete()])
    assert "table deleted" in reports.get(timeout=PATIENCE)
    assert_repaired(backend, WEB)

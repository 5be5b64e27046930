"""The backend around a base that succeeds or fails, with the real maps and programs."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kproxy_core.backend.api import BackendSettings, Scope, SyncReport, Update
from kproxy_core.backend.errors import SyncFailed, TrustLost
from kproxy_core.model.address import Family
from kproxy_core.testing.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_ebpf.backend import EbpfBackend
from kproxy_ebpf.settings import Settings

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")
NODE6 = node_view("node1", family=Family.IPV6, pods="fd00:244::/64", node_port_addresses="2001:db8::1")
V4 = full_update(NODE, plans(NODE, service(), endpoint_slice("web", "10.244.2.1")))
V6 = full_update(NODE6, plans(NODE6, service(ip="fd00:96::1"), endpoint_slice("web", "fd00:244:2::1")))


@pytest.fixture
def backend(settings: Settings) -> Iterator[EbpfBackend]:
    options = {"cgroup": settings.cgroup, "pinDirectory": settings.pin_directory}
    made = EbpfBackend(BackendSettings((Family.IPV4, Family.IPV6), options=options))
    begun = made.kproxy_begin()
    next(begun)
    finish(begun, True)
    yield made
    closed = made.kproxy_close()
    next(closed)
    finish(closed, None)


def finish(calls: object, answer: object) -> object:
    """Have the base return *answer* to a wrapper; return what the wrapper returns."""
    try:
        calls.send(answer)  # type: ignore[attr-defined]
    except StopIteration as ended:
        return ended.value
    raise AssertionError("the wrapper has not returned")


def sync(backend: EbpfBackend, update: Update) -> object:
    calls = backend.kproxy_sync(update)
    next(calls)
    return finish(calls, SyncReport(0))


def sync_with_failing_base(
    backend: EbpfBackend, update: Update, error: type[SyncFailed] = SyncFailed
) -> None:
    calls = backend.kproxy_sync(update)
    next(calls)
    with pytest.raises(error):
        calls.throw(error("no"))


def is_attached(backend: EbpfBackend) -> bool:
    return bool(backend.kproxy_measure()[0].value)


def test_a_family_whose_rules_fail_does_not_stop_the_other(backend: EbpfBackend) -> None:
    sync_with_failing_base(backend, V6)
    assert not is_attached(backend)
    sync(backend, V4)
    assert is_attached(backend)
    sync_with_failing_base(backend, V6)
    change = replace(V4, scope=Scope.CHANGED)
    assert sync(backend, change) == SyncReport(0)
    assert sync(backend, V6) != SyncReport(0)


REMOVAL = replace(V4, scope=Scope.CHANGED, changed=dict.fromkeys(V4.changed), plans={})


def test_a_change_that_the_rules_refuse_leaves_the_maps_as_they_were(backend: EbpfBackend) -> None:
    sync(backend, V4)
    sync_with_failing_base(backend, REMOVAL)
    assert sync(backend, V4) == SyncReport(0)
    assert sync(backend, REMOVAL) != SyncReport(0)
    assert sync(backend, REMOVAL) == SyncReport(0)


def test_when_the_rules_are_unknown_the_maps_are_read_again(backend: EbpfBackend) -> None:
    sync(backend, V4)
    sync_with_failing_base(backend, REMOVAL, TrustLost)
    with pytest.raises(TrustLost):
        next(backend.kproxy_sync(REMOVAL))
    assert sync(backend, V4) != SyncReport(0)
    assert sync(backend, V4) == SyncReport(0)

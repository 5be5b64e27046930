"""Limits and timeouts of tracked connections, in a network namespace."""

import logging
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kproxy_core.app import preparation
from kproxy_core.linux import sysctl
from kproxy_core.linux.conntrack_limits import ConntrackLimits, apply_limits
from kproxy_core.observe.events import ClusterEvent, EventRecorder
from tests.core.namespaces import Namespace, namespace

NOT_WRITABLE = Path("/proc/sys/net/netfilter/nf_conntrack_count")
"""A file with a small number that no process can write."""


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace() as made:
        # The kernel tracks connections in a namespace that has a rule about them.
        made.nft("table ip t { chain c { type filter hook input priority 0; ct state new accept; }; }")
        yield made


def value(node: Namespace, name: str) -> int:
    return int(node.inside(lambda: sysctl.read(f"net/netfilter/{name}")))


@pytest.mark.parametrize(
    ("per_core", "least", "cores", "most"),
    [
        (0, 131072, 4, 0),
        (32768, 131072, 2, 131072),
        (32768, 131072, 8, 262144),
        (32768, 131072, 64, 1048576),
        (32768, 2000000, 4, 2000000),
        (32768, 2000000, 64, 1048576),
    ],
)
def test_the_limit_of_tracked_connections(per_core: int, least: int, cores: int, most: int) -> None:
    assert ConntrackLimits(max_per_core=per_core, min=least).max_connections(cores) == most


def test_each_setting_arrives(node: Namespace) -> None:
    node.inside(lambda: apply_limits(ConntrackLimits(
        max_per_core=0, tcp_established_timeout=7201, tcp_close_wait_timeout=61, tcp_be_liberal=True,
        udp_timeout=31.9, udp_stream_timeout=121,
    )))
    assert value(node, "nf_conntrack_tcp_timeout_established") == 7201
    assert value(node, "nf_conntrack_tcp_timeout_close_wait") == 61
    assert value(node, "nf_conntrack_tcp_be_liberal") == 1
    assert value(node, "nf_conntrack_udp_timeout") == 31
    assert value(node, "nf_conntrack_udp_timeout_stream") == 121


def test_zero_keeps_the_kernels_value_and_liberal_is_never_reset(node: Namespace) -> None:
    node.run("sysctl", "-qw", "net.netfilter.nf_conntrack_udp_timeout=77",
             "net.netfilter.nf_conntrack_tcp_be_liberal=1")
    applied = node.inside(lambda: apply_limits(ConntrackLimits(max_per_core=0)))
    assert value(node, "nf_conntrack_udp_timeout") == 77
    assert value(node, "nf_conntrack_tcp_be_liberal") == 1
    assert applied.refused == ()


def test_a_refused_limit_is_reported_and_the_rest_is_set(node: Namespace) -> None:
    other = value(node, "nf_conntrack_max") + 1
    applied = node.inside(lambda: apply_limits(ConntrackLimits(
        max_per_core=1, min=other, tcp_close_wait_timeout=62)))
    assert [str(error) for error in applied.refused] == [
        f"cannot set sysctl net/netfilter/nf_conntrack_max to {other}: Permission denied"]
    assert value(node, "nf_conntrack_tcp_timeout_close_wait") == 62


def test_a_higher_limit_is_kept(node: Namespace, tmp_path: Path) -> None:
    held = value(node, "nf_conntrack_max")
    (size := tmp_path / "hashsize").write_text(f"{held}\n")
    applied = node.inside(lambda: apply_limits(ConntrackLimits(max_per_core=1, min=held - 1), hash_size=size))
    assert (applied.refused, value(node, "nf_conntrack_max")) == ((), held)


def as_it_is(node: Namespace) -> ConntrackLimits:
    """Limits that require no write."""
    return ConntrackLimits(max_per_core=1, min=value(node, "nf_conntrack_max"))


def test_the_table_grows_with_the_limit_and_never_shrinks(node: Namespace, tmp_path: Path) -> None:
    limits, size = as_it_is(node), tmp_path / "hashsize"
    for before, after in (("1000\n", limits.min // 4), (f"{limits.min}\n", limits.min)):
        size.write_text(before)
        assert not node.inside(lambda: apply_limits(limits, hash_size=size)).read_only_sys
        assert int(size.read_text()) == after


def test_a_read_only_sys_is_an_event_and_nothing_worse(
    node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = as_it_is(node)
    monkeypatch.setattr(preparation, "apply_limits", partial(apply_limits, hash_size=NOT_WRITABLE))
    told: list[ClusterEvent] = []
    events = EventRecorder("node1", lambda event, _: told.append(event))
    assert node.inside(lambda: preparation.tune_conntrack(limits, events))
    events.close()
    assert [(event.type, event.reason, event.name) for event in told] == [
        ("Warning", "readOnlySysFS", "node1")]


def test_a_process_raises_its_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        preparation.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_limit_of_open_files_that_may_not_be_read_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    logging.getLogger("kproxy").propagate = True
    monkeypatch.setattr(resource, "getrlimit", refuse)
    preparation.raise_file_limit()
    assert "could not raise the limit of open files" in caplog.text

"""Many requests over netlink at once."""

import errno

import pytest

from kproxy_core.host.netlink import messages as netlink
from kproxy_core.testing.conformance.privileges import without_privileges
from kproxy_ipvs.kernel.exchange import Refusal, Request, exchange

NOTHING = 0xEE << 8
"""A subsystem of nfnetlink that no kernel has."""


def test_each_request_that_is_refused_is_told() -> None:
    with netlink.open_socket(netlink.NETLINK_NETFILTER) as sock:
        refused = exchange(sock, [Request(NOTHING, 0, bytes(4))] * 3)
    assert [at for at, _ in refused] == [0, 1, 2]


def test_without_privileges_nobody_waits_for_the_answers_that_the_kernel_does_not_give() -> None:
    with netlink.open_socket(netlink.NETLINK_NETFILTER) as sock, without_privileges():
        with pytest.raises(PermissionError):
            exchange(sock, [Request(NOTHING, 0, bytes(4))] * 3)
        assert exchange(sock, [Request(NOTHING, 0, bytes(4))]) == [Refusal(0, errno.EPERM)]


def test_batches_follow_one_another() -> None:
    unknown = Request(0xFF, 0, bytes(16))
    with netlink.open_socket(netlink.NETLINK_ROUTE) as sock:
        assert [at for at, _ in exchange(sock, [unknown] * 450)] == [*range(450)]

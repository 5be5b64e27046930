"""Sending requests over netlink many at a time (linux/netlink.h)."""

import errno
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from kproxy_core.host.netlink import messages as netlink

_MOST, _LONGEST = 200, 1 << 16
"""Requests and bytes in one batch: it fits into the socket's buffer, and so do errors about all of it."""


class Request(NamedTuple):
    """A netlink message without its header."""

    kind: int
    flags: int
    payload: bytes


class Refusal(NamedTuple):
    """A request that the kernel did not do."""

    number: int
    """Index of the request."""
    code: int
    """The error number; that of an ipset error is beyond those of errno.h."""


def exchange(sock: socket.socket, requests: Sequence[Request]) -> list[Refusal]:
    """Send *requests*; returns those that were refused. Only the last is confirmed.

    Raises OSError, also if a batch is refused as a whole: without the
    privilege for it, one hears of the first request only.
    """
    refused: list[Refusal] = []
    start = size = 0
    for at, request in enumerate(requests):
        if at - start == _MOST or (at > start and size + len(request.payload) > _LONGEST):
            refused += _exchange(sock, requests, start, at)
            start, size = at, 0
        size += len(request.payload)
    return refused + _exchange(sock, requests, start, len(requests))


def _exchange(sock: socket.socket, requests: Sequence[Request], start: int, end: int) -> list[Refusal]:
    refused: list[Refusal] = []
    if start == end:
        return refused
    sock.send(b"".join([
        netlink.message(kind, flags | (netlink.NLM_F_ACK if number == end else 0), payload, number)
        for number, (kind, flags, payload) in enumerate(requests[start:end], start + 1)
    ]))  # fmt: skip
    while True:
        try:
            # The kernel answers before `send` returns: what is not there by now never comes.
            data = sock.recv(netlink.RECEIVE_SIZE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            code = refused[-1].code if refused else errno.EIO
            raise OSError(code, os.strerror(code)) from None
        for kind, _, number, at, _ in netlink.messages(data):
            if kind != netlink.NLMSG_ERROR:
                continue
            if code := netlink.error_code(data, at):
                refused.append(Refusal(number - 1, code))
            if number == end:
                return refused

"""Noticing at once what somebody else does to our tables.

nf_tables announces every commit to NFNLGRP_NFTABLES: its changes, then a message
with the number of the commit and the process behind it. Our own commits are
filtered out in the kernel, so an idle proxy is not woken by them.
"""

import ctypes
import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Collection, Iterator
from typing import NamedTuple

from kproxy_core.backend.api import Damage
from kproxy_core.model.address import Family
from kproxy_nftables.batch import HEADER_SIZE, NFPROTO, parse_attributes
from kproxy_nftables.kernel import SOL_NETLINK, open_socket
from kproxy_nftables.names import TABLE

_NFNLGRP_NFTABLES = 7
_NETLINK_ADD_MEMBERSHIP = 1
_SO_ATTACH_FILTER = 26
_NFNL_SUBSYS_NFTABLES = 10
_NEWGEN = 15
_GEN_PID, _GEN_NAME = 2, 3
_FAMILIES = {number: family for family, number in NFPROTO.items()}
_CHANGES = {
    0: "table added", 2: "table deleted", 3: "chain added", 5: "chain deleted", 6: "rule added",
    8: "rule deleted", 9: "set added", 11: "set deleted", 12: "element added", 14: "element deleted",
}  # fmt: skip
_HEADER = struct.Struct("=IHHIIBBH")


class ForeignChange(NamedTuple):
    """What one commit by somebody else did to our table of one family."""

    family: Family
    what: str


class Watcher:
    """Reports foreign changes from a thread of its own until it is closed."""

    def __init__(self, own_ports: Collection[int], damaged: Damage) -> None:
        """Begin watching. *own_ports* are the netlink ports whose commits are ours.

        Raises OSError if the kernel does not let us listen.
        """
        self._damaged = damaged
        self._own_ports = own_ports
        self._socket = open_socket()
        attach_filter(self._socket, own_ports)
        self._socket.setsockopt(SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, _NFNLGRP_NFTABLES)
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="nftables-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; returns when no further report will come."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._socket.close()
        os.close(self._stop)

    def _run(self) -> None:
        commits = Commits(self._own_ports)
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._stop in ready:
                return
            try:
                data = self._socket.recv(1 << 17)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                for family in Family:
                    self._damaged(family, "notifications were lost")
                continue
            for change in commits.read(data):
                self._damaged(change.family, change.what)


class Commits:
    """Puts notifications together into what each commit did to our tables."""

    def __init__(self, own_ports: Collection[int] = ()) -> None:
        """*own_ports* are looked at anew for each message: libnftables may reopen its socket."""
        self._own_ports = own_ports
        self._seen: dict[Family, dict[str, int]] = {}

    def read(self, data: bytes) -> Iterator[ForeignChange]:
        """Take in the messages of one datagram; yields at the end of each commit that touched us."""
        at = 0
        while at + HEADER_SIZE <= len(data):
            size, kind, _, _, port, nfproto, _, _ = _HEADER.unpack_from(data, at)
            if size < HEADER_SIZE:
                return
            if kind >> 8 == _NFNL_SUBSYS_NFTABLES:
                if kind & 0xFF == _NEWGEN:
                    by = _author(data, at + HEADER_SIZE, at + size)
                    for family, changes in self._seen.items():
                        what = ", ".join(f"{what} ({n}x)" if n > 1 else what for what, n in changes.items())
                        yield ForeignChange(family, what + by)
                    self._seen = {}
                elif nfproto in _FAMILIES and port not in self._own_ports:
                    self._note(_FAMILIES[nfproto], kind & 0xFF, data, at + HEADER_SIZE, at + size)
            at += (size + 3) & ~3

    def _note(self, family: Family, kind: int, data: bytes, start: int, end: int) -> None:
        # The table's name is the first attribute of every message about something in it.
        for attribute, value, value_end in parse_attributes(data, start, end):
            if attribute == 1 and data[value : value_end - 1] == TABLE.encode() and kind in _CHANGES:
                changes = self._seen.setdefault(family, {})
                changes[_CHANGES[kind]] = changes.get(_CHANGES[kind], 0) + 1
            return


def _author(data: bytes, start: int, end: int) -> str:
    pid, name = 0, ""
    for attribute, value, value_end in parse_attributes(data, start, end):
        if attribute == _GEN_PID:
            pid = struct.unpack_from(">I", data, value)[0]
        elif attribute == _GEN_NAME:
            name = data[value : value_end - 1].decode(errors="replace")
    return f" by {name}[{pid}]" if name else ""


def attach_filter(connection: socket.socket, own_ports: Collection[int]) -> None:
    """Let the kernel drop datagrams whose first message comes from one of *own_ports*.

    A datagram holds messages of one commit only. Classic BPF (linux/filter.h): load the
    sender's port from the netlink header, compare, accept or drop.
    """
    load, jump_if_equal, give_back = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 12)]
    for left, port in enumerate(reversed(list(own_ports))):
        # Loads are big-endian, netlink headers are in host order.
        program.insert(1, (jump_if_equal, left + 1, 0, int.from_bytes(struct.pack("=I", port), "big")))
    program += [(give_back, 0, 0, 0xFFFFFFFF), (give_back, 0, 0, 0)]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    fprog = struct.pack("HP", len(program), ctypes.addressof(buffer))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)

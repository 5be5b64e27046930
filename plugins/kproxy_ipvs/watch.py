"""Noticing what somebody else does to our device; about the rest the kernel tells nobody.

IPVS and ipsets have no notifications (linux/ip_vs.h, linux/netfilter/ipset/ip_set.h).
"""

import errno
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Iterable

from kproxy_core.backend.api import Damage
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.model.address import FAMILY_BY_AF, Address, Family, format_address
from kproxy_ipvs.family import FamilyState
from kproxy_ipvs.names import DEVICE

log = logging.getLogger("kproxy.ipvs")

_RTMGRP_LINK, _RTMGRP_IPV4_IFADDR, _RTMGRP_IPV6_IFADDR = 0x1, 0x10, 0x100
_RTM_DELLINK, _RTM_DELADDR = 17, 21
_IFINFOMSG = struct.Struct("=BxHiII")
_IFADDRMSG = struct.Struct("=BBBBI")
_IFLA_IFNAME, _IFA_ADDRESS = 3, 1

_SO_RCVBUFFORCE = 33
_BUFFER = 4 << 20
"""Bytes of notifications that may wait: our own changes are announced as well."""


class DeviceWatch:
    """Reports addresses that are taken off the device, and its deletion, from a thread of its own."""

    def __init__(self, states: Iterable[FamilyState], damaged: Damage) -> None:
        """Begin watching. Raises HostError."""
        self._states = {state.family: state for state in states}
        self._damaged = damaged
        groups = _RTMGRP_LINK | _RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR
        try:
            self._events = netlink.open_socket(netlink.NETLINK_ROUTE, groups)
            self._events.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        except OSError as error:
            raise HostError(f"{DEVICE} can't be watched: {error.strerror}") from error
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="ipvs-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; returns when no further report will come."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._events.close()
        os.close(self._stop)

    def _run(self) -> None:
        waiting = select.poll()
        waiting.register(self._events, select.POLLIN)
        waiting.register(self._stop, select.POLLIN)
        while True:
            if any(descriptor == self._stop for descriptor, _ in waiting.poll()):
                return
            try:
                data = self._events.recv(netlink.RECEIVE_SIZE)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self._report_all("notifications were lost")
                continue
            self._judge(data)

    def _judge(self, data: bytes) -> None:
        lost: dict[Family, list[Address]] = {}
        for kind, _, _, start, end in netlink.messages(data):
            if kind == _RTM_DELLINK:
                name = netlink.attributes(data, start + _IFINFOMSG.size, end).get(_IFLA_IFNAME, b"")
                if name.rstrip(b"\0") == DEVICE.encode():
                    self._report_all(f"interface {DEVICE} deleted")
            elif kind == _RTM_DELADDR:
                number, _, _, _, index = _IFADDRMSG.unpack_from(data, start)
                state = self._states.get(FAMILY_BY_AF.get(number, Family.IPV4))
                address = Address(netlink.attributes(data, start + _IFADDRMSG.size, end)[_IFA_ADDRESS])
                # What is taken off by ourselves is wanted no longer.
                if state is not None and state.expects(address) and _name(index) in (DEVICE, ""):
                    lost.setdefault(state.family, []).append(address)
        for family, addresses in lost.items():
            self._damaged(family, f"{format_address(addresses[0])} taken off {DEVICE}")

    def _report_all(self, what: str) -> None:
        for family in self._states:
            self._damaged(family, what)


def _name(index: int) -> str:
    try:
        return socket.if_indextoname(index)
    except OSError:
        return ""

"""The addresses of this node's interfaces, now and when they change (linux/rtnetlink.h).

Everything acts on the network namespace of the calling thread.
"""

import errno
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.model.address import Address, Family, is_loopback

log = logging.getLogger("kproxy.host")

_RTM_NEWADDR: Final = 20
_RTM_DELADDR: Final = 21
_RTM_GETADDR: Final = 22
_RTMGRP_IPV4_IFADDR: Final = 0x10
_RTMGRP_IPV6_IFADDR: Final = 0x100
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_IFADDRMSG = struct.Struct("=BBBBI")

_RETRY_MILLISECONDS: Final = 1000

# Reserved and routed by nobody in particular, so that only a default route leads there: the dummy address
# of RFC 7600, and the far end of the documentation prefix.
_ANYWHERE: Final = {
    Family.IPV4: (socket.AF_INET, "192.0.0.8"),
    Family.IPV6: (socket.AF_INET6, "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"),
}

_Key = tuple[int, int, bytes | None, bytes | None]
"""What tells two interface addresses apart: interface, prefix length, address or peer, local address."""


_Wanted = Callable[[str], bool]
"""Whether an interface counts, by its name."""


def node_addresses(wanted: _Wanted = lambda _: True) -> frozenset[Address]:
    """The addresses of all *wanted* interfaces in both families, loopback and link-local ones included.

    Raises HostError.
    """
    return frozenset(_read(wanted).values())


def watch_addresses(
    callback: Callable[[frozenset[Address]], None], wanted: _Wanted = lambda _: True
) -> "AddressWatcher":
    """Call *callback* with all addresses, as `node_addresses` has them, whenever they have changed.

    It is called from a thread of its own, which sleeps until then. *wanted* is asked about an interface
    when an address comes, from that thread. Raises HostError.
    """
    return AddressWatcher(callback, wanted)


def default_source_address(family: Family) -> Address | None:
    """The address with which this node sends into the default route of *family*; None without such a route.

    Nothing is sent.
    """
    number, anywhere = _ANYWHERE[family]
    try:
        with socket.socket(number, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect((anywhere, 9))
            address = Address(socket.inet_pton(number, sock.getsockname()[0].partition("%")[0]))
    except OSError:
        return None
    return None if is_loopback(address) or address.startswith(b"\xfe\x80") else address


class AddressWatcher:
    """See `watch_addresses`."""

    def __init__(self, callback: Callable[[frozenset[Address]], None], wanted: _Wanted) -> None:
        self._callback = callback
        self._wanted = wanted
        try:
            self._events = netlink.open_socket(
                netlink.NETLINK_ROUTE, _RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR
            )
        except OSError as error:
            raise HostError("can't watch interface addresses", error) from error
        try:
            # Only now: what changes while it is read is in a notification too.
            self._held = _read(self._wanted)
            self._stop: int | None = os.eventfd(0)
        except BaseException:
            self._events.close()
            raise
        self._complete = True
        self._addresses = frozenset(self._held.values())
        self._thread = threading.Thread(
            target=self._run, args=[self._stop], name="kproxy-addresses", daemon=True
        )
        self._thread.start()

    @property
    def addresses(self) -> frozenset[Address]:
        """All addresses as last known."""
        return self._addresses

    def close(self) -> None:
        """End the thread; no further call comes. Not to be called from the callback."""
        if self._stop is None:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = None
        self._events.close()

    def _run(self, stop: int) -> None:
        waiting = select.poll()
        waiting.register(self._events, select.POLLIN)
        waiting.register(stop, select.POLLIN)
        while True:
            ready = waiting.poll(None if self._complete else _RETRY_MILLISECONDS)
            if any(fd == stop for fd, _ in ready):
                return
            self._follow()
            addresses = frozenset(self._held.values())
            if addresses != self._addresses:
                self._addresses = addresses
                self._callback(addresses)

    def _follow(self) -> None:
        """Bring what is held up to date with all notifications there are."""
        while True:
            try:
                data = self._events.recv(netlink.RECEIVE_SIZE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                # The kernel had more to say than the socket holds. What is left in there is older than that.
                self._complete = False
                log.info("changes of interface addresses were missed, reading all of them")
                continue
            for kind, _, _, start, end in netlink.messages(data):
                if kind in (_RTM_NEWADDR, _RTM_DELADDR):
                    key, address = _entry(data, start, end)
                    if kind == _RTM_DELADDR:
                        self._held.pop(key, None)
                    elif self._wanted(_name(key)):
                        self._held[key] = address
        if not self._complete:
            try:
                self._held = _read(self._wanted)
                self._complete = True
            except HostError as error:
                log.warning("trying again in a second", extra={"fields": {"error": str(error)}})


def _read(wanted: _Wanted) -> dict[_Key, Address]:
    request = netlink.message(_RTM_GETADDR, netlink.NLM_F_DUMP, _IFADDRMSG.pack(0, 0, 0, 0, 0))
    try:
        with netlink.open_socket(netlink.NETLINK_ROUTE) as sock:
            found = netlink.uninterrupted(lambda: dict(_entry(*part) for part in netlink.dump(sock, request)))
    except OSError as error:
        raise HostError("can't read interface addresses", error) from error
    counts = {key[0]: wanted(_name(key)) for key in {key[0]: key for key in found}.values()}
    return {key: address for key, address in found.items() if counts[key[0]]}


def _name(key: _Key) -> str:
    """The name of the interface; "" if it is gone, as its addresses are then."""
    try:
        return socket.if_indextoname(key[0])
    except OSError:
        return ""


def _entry(data: bytes, start: int, end: int) -> tuple[_Key, Address]:
    _, prefix, _, _, interface = _IFADDRMSG.unpack_from(data, start)
    found = netlink.attributes(data, start + _IFADDRMSG.size, end)
    address, local = found.get(_IFA_ADDRESS), found.get(_IFA_LOCAL)
    # On a point-to-point link IFA_ADDRESS is the other end; IPv6 has IFA_LOCAL there only.
    return (interface, prefix, address, local), Address(local or address or b"")

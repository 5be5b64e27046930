"""Detection of foreign changes to the device. The kernel announces no changes of IPVS and ipsets."""

import struct
from collections.abc import Iterable, Sequence

from kproxy_core.contract import FAMILY_BY_AF, Address, Damage, Family, format_address
from kproxy_core.linux import addresses
from kproxy_core.linux.errors import doing
from kproxy_core.netlink.messages import NETLINK_ROUTE, attributes, messages, text
from kproxy_core.netlink.sockets import NetlinkSocket, NotificationThread
from kproxy_ipvs.family import FamilyState
from kproxy_ipvs.names import DEVICE

_RTM_DELLINK = 17
_IFINFOMSG = struct.Struct("=BxHiII")
_IFLA_IFNAME = 3

_RECEIVE_SPACE = 4 << 20
"""Size in bytes of the buffer for notifications, which include those of our own changes."""


class Watcher(NotificationThread):
    """Reports deletions of addresses from the device, and of the device, from a thread of its own."""

    def __init__(self, states: Iterable[FamilyState], damaged: Damage) -> None:
        """Start watching. Raises HostError."""
        self._states = {state.family: state for state in states}
        self._damaged = damaged
        with doing(f"watch {DEVICE}"):
            groups = (addresses.RTNLGRP_LINK, addresses.RTNLGRP_IPV4_IFADDR, addresses.RTNLGRP_IPV6_IFADDR)
            sock = NetlinkSocket.open(NETLINK_ROUTE, groups=groups, receive_space=_RECEIVE_SPACE)
        super().__init__("ipvs-watch", sock, self._receive)

    def _receive(self, datagrams: Sequence[bytes], lost: bool) -> None:
        deleted: dict[Family, Address] = {}
        for data in datagrams:
            for kind, _, _, start, end in messages(data):
                if kind == _RTM_DELLINK:
                    name = attributes(data, start + _IFINFOMSG.size, end).get(_IFLA_IFNAME, b"")
                    if text(name) == DEVICE:
                        self._report_all(f"interface {DEVICE} deleted")
                elif kind == addresses.RTM_DELADDR:
                    changed = addresses.decode_interface_address(data, start, end)
                    family = FAMILY_BY_AF.get(changed.family)
                    state = None if family is None else self._states.get(family)
                    # "": the interface has been deleted in the meantime.
                    on_device = addresses.interface_name(changed.interface) in (DEVICE, "")
                    if state is not None and on_device and state.expects(changed.address):
                        deleted.setdefault(state.family, changed.address)
        for family, address in deleted.items():
            self._damaged(family, f"{format_address(address)} deleted from {DEVICE}")
        if lost:
            self._report_all("notifications were lost")

    def _report_all(self, what: str) -> None:
        for family in self._states:
            self._damaged(family, what)

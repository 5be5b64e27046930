"""What /proc tells about IPVS and about the node's own connections.

net/netfilter/ipvs/ip_vs_ctl.c and ip_vs_conn.c, net/ipv4/tcp_ipv4.c and udp.c: what ends in ``seq_show``.

Netlink gives the real servers of one virtual server at a time; here one file has them all. Others may
change things while it is read, and a virtual server may then be missing.
"""

import struct
from collections import Counter
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from kproxy_core.model.address import Address, Family, Protocol, parse_address
from kproxy_core.model.endpoint import Destination
from kproxy_core.plan.service_plan import Frontend
from kproxy_ipvs.batch.servers import Listed
from kproxy_ipvs.wanted import ServerKey

_DIRECTORY = Path("/proc/thread-self/net")
"""Of the network namespace of the calling thread."""

SERVERS = _DIRECTORY / "ip_vs"
CONNECTIONS = _DIRECTORY / "ip_vs_conn"
SOCKETS = {
    Family.IPV4: (_DIRECTORY / "tcp", _DIRECTORY / "udp"),
    Family.IPV6: (_DIRECTORY / "tcp6", _DIRECTORY / "udp6"),
}

_PROTOCOLS = {protocol.name: protocol for protocol in Protocol}

_OPEN = frozenset({"ESTABLISHED", "SYN_SENT", "SYN_RECV", "SYNACK"})
"""States of TCP and SCTP connections that IPVS calls active."""
_ENDED = frozenset({"TIME_WAIT", "CLOSE", "CLOSED", "REJECTED"})
"""States in which nobody has anything new to say."""
_REPEATING = 117
"""Seconds of the two minutes of TIME_WAIT that are left while a last segment may have to be sent again: the
state begins when IPVS sees that segment, and anew when it does again."""

_NO_CONNECTION = frozenset({"03", "06", "07", "0A", "0C"})
"""States of sockets, linux/tcp_states.h: SYN_RECV, TIME_WAIT, CLOSE, LISTEN, NEW_SYN_RECV.

One of UDP that is connected is in the state ESTABLISHED.
"""


class Translation(NamedTuple):
    """What IPVS does to connections: they are for the one, and lead to the other."""

    frontend: Frontend
    real_server: Destination


def real_servers(lines: Iterable[str]) -> dict[ServerKey, list[Listed]]:
    """The real servers by virtual server, from the lines of `SERVERS`.

    Virtual servers known by a mark are left out: the list does not tell their family.
    """
    found: dict[ServerKey, list[Listed]] = {}
    current: list[Listed] = []
    for line in lines:
        words = line.split()
        if words[0] == "->":
            if len(words) == 6 and words[1] != "RemoteAddress:Port":
                where = Destination(*_socket(words[1]))
                current.append(Listed(where, int(words[3]), int(words[4]), int(words[5])))
        elif protocol := _PROTOCOLS.get(words[0]):
            address, port = _socket(words[1])
            family = Family.IPV4 if len(address) == Family.IPV4.size else Family.IPV6
            current = found[ServerKey(family, 0, address, protocol, port)] = []
        else:
            current = []
    return found


def closing(lines: Iterable[str]) -> Counter[Translation]:
    """How many connections have a side that may still send, though IPVS calls them inactive.

    From the lines of `CONNECTIONS`. What persistence remembers of clients stands there as well, with port 0.
    Those of UDP are left out: IPVS does not know whether they have ended.
    """
    found: Counter[Translation] = Counter()
    for line in lines:
        words = line.split()
        protocol = _PROTOCOLS.get(words[0])
        if protocol is None or protocol is Protocol.UDP or words[2] == "0000" or words[7] in _OPEN:
            continue
        if words[7] not in _ENDED or (words[7] == "TIME_WAIT" and int(words[8]) >= _REPEATING):
            frontend = Frontend(_address(words[3]), protocol, int(words[4], 16))
            found[Translation(frontend, Destination(_address(words[5]), int(words[6], 16)))] += 1
    return found


def connected_from(addresses: Container[Address], lines: Iterable[str]) -> Counter[Address]:
    """How many connections of the node's own come from *addresses*, from the lines of `SOCKETS`."""
    found: Counter[Address] = Counter()
    for line in lines:
        words = line.split(maxsplit=4)
        text = words[1].partition(":")[0]
        if words[0] == "sl" or words[3] in _NO_CONNECTION:
            continue
        numbers = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
        address = Address(struct.pack(f"={len(numbers)}I", *numbers))
        if address in addresses:
            found[address] += 1
    return found


def _socket(text: str) -> tuple[Address, int]:
    address, _, port = text.rpartition(":")
    return _address(address.strip("[]")), int(port, 16)


def _address(text: str) -> Address:
    return Address(bytes.fromhex(text)) if ":" not in text else parse_address(text)

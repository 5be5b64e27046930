"""Connections of IPVS and of the node, as listed in /proc.

Sources: the ``seq_show`` functions of net/netfilter/ipvs/ip_vs_ctl.c and ip_vs_conn.c, net/ipv4/tcp_ipv4.c
and udp.c. Netlink lists the real servers of one virtual server at a time, a file in /proc lists all. A
virtual server may be missing from it if others change while it is read.
"""

import struct
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from kproxy_core.contract import (
    Address,
    Destination,
    Family,
    Frontend,
    HostError,
    Protocol,
    family_of,
    parse_address,
)
from kproxy_core.linux.errors import doing
from kproxy_ipvs.batch import RealServer
from kproxy_ipvs.wanted import ServerKey

_T = TypeVar("_T")

_DIRECTORY = Path("/proc/thread-self/net")
"""Files of the calling thread's network namespace."""

SERVERS = _DIRECTORY / "ip_vs"
CONNECTIONS = _DIRECTORY / "ip_vs_conn"
_SOCKETS = {
    Family.IPV4: (_DIRECTORY / "tcp", _DIRECTORY / "udp"),
    Family.IPV6: (_DIRECTORY / "tcp6", _DIRECTORY / "udp6"),
}

_PROTOCOLS = {protocol.name: protocol for protocol in Protocol}

_OPEN = frozenset({"ESTABLISHED", "SYN_SENT", "SYN_RECV", "SYNACK"})
"""States of TCP and SCTP connections that IPVS counts as active."""
_ENDED = frozenset({"TIME_WAIT", "CLOSE", "CLOSED", "REJECTED"})
"""States in which neither side has new data to send."""
_RETRANSMITTING = 117
"""Remaining seconds of TIME_WAIT, of 120, down to which a last segment may be retransmitted.

The timer starts when IPVS sees that segment, and restarts with every retransmission.
"""

_NO_CONNECTION = frozenset({"03", "06", "07", "0A", "0C"})
"""States of sockets, linux/tcp_states.h: SYN_RECV, TIME_WAIT, CLOSE, LISTEN, NEW_SYN_RECV.

A connected UDP socket has the state ESTABLISHED.
"""


class Translation(NamedTuple):
    """A frontend and the real server to which IPVS forwards its connections."""

    frontend: Frontend
    real_server: Destination


def read_real_servers() -> dict[ServerKey, list[RealServer]]:
    """Return the real servers of those virtual servers that /proc lists; {} if it can't be read."""
    try:
        return parse_real_servers(_lines(SERVERS))
    except HostError:
        return {}


def count_closing() -> Counter[Translation]:
    """Count the connections of `parse_closing`. Raises HostError."""
    return _twice(lambda: parse_closing(_lines(CONNECTIONS)))


def count_connected_from(addresses: Container[Address], family: Family) -> Counter[Address]:
    """Count the node's own connections from *addresses* by source. Raises HostError."""
    return _twice(lambda: parse_connected_from(addresses, chain.from_iterable(map(_lines, _SOCKETS[family]))))


def read_template(key: ServerKey, client: Address) -> Destination | None:
    """Return the real server to which persistence has pinned *client*; None also if /proc can't be read.

    Templates of virtual servers with a mark are not looked up.
    """
    if key.address is None:
        return None
    try:
        return parse_template(client, Destination(key.address, key.port), _lines(CONNECTIONS))
    except HostError:
        return None


def parse_real_servers(lines: Iterable[str]) -> dict[ServerKey, list[RealServer]]:
    """Return the real servers by virtual server, from the lines of `SERVERS`.

    Virtual servers with a mark are left out, because the file does not name their family.
    """
    found: dict[ServerKey, list[RealServer]] = {}
    current: list[RealServer] = []
    for line in lines:
        words = line.split()
        if words[0] == "->":
            if len(words) == 6 and words[1] != "RemoteAddress:Port":
                where = Destination(*_socket(words[1]))
                current.append(RealServer(where, int(words[3]), int(words[4]), int(words[5])))
        elif protocol := _PROTOCOLS.get(words[0]):
            address, port = _socket(words[1])
            current = found[ServerKey(family_of(address), 0, address, protocol, port)] = []
        else:
            current = []
    return found


def parse_closing(lines: Iterable[str]) -> Counter[Translation]:
    """Count inactive connections with a side that may still send, from the lines of `CONNECTIONS`.

    Leaves out persistence templates, which have port 0, and UDP, whose end IPVS does not know.
    """
    found: Counter[Translation] = Counter()
    for line in lines:
        words = line.split()
        protocol = _PROTOCOLS.get(words[0])
        if protocol is None or protocol is Protocol.UDP or words[2] == "0000" or words[7] in _OPEN:
            continue
        if words[7] not in _ENDED or (words[7] == "TIME_WAIT" and int(words[8]) >= _RETRANSMITTING):
            frontend = Frontend(_address(words[3]), protocol, int(words[4], 16))
            found[Translation(frontend, Destination(_address(words[5]), int(words[6], 16)))] += 1
    return found


def parse_template(client: Address, frontend: Destination, lines: Iterable[str]) -> Destination | None:
    """Return the real server in the persistence template of *client*, from the lines of `CONNECTIONS`."""
    for line in lines:
        words = line.split()
        if words[0] not in _PROTOCOLS or words[2] != "0000":
            continue
        if _address(words[1]) == client and (_address(words[3]), int(words[4], 16)) == frontend:
            return Destination(_address(words[5]), int(words[6], 16))
    return None


def parse_connected_from(addresses: Container[Address], lines: Iterable[str]) -> Counter[Address]:
    """Count connections from *addresses* by source, from the lines of /proc/net/tcp and the like."""
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


def _twice(count: Callable[[], Counter[_T]]) -> Counter[_T]:
    """Return the greater of two counts of each item: a file lacks items if others end while it is read."""
    return count() | count()


def _lines(path: Path) -> Iterator[str]:
    with doing(f"read {path}"), path.open(encoding="ascii") as lines:
        yield from lines


def _socket(text: str) -> tuple[Address, int]:
    address, _, port = text.rpartition(":")
    return _address(address.strip("[]")), int(port, 16)


def _address(text: str) -> Address:
    return Address(bytes.fromhex(text)) if ":" not in text else parse_address(text)

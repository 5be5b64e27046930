"""What /proc tells about IPVS (net/netfilter/ipvs/ip_vs_ctl.c and ip_vs_conn.c, `seq_show`).

Netlink gives the real servers of one virtual server at a time; here one file has them all. Others may
change things while it is read, and a virtual server may then be missing.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from kproxy_core.model.address import Address, Family, Protocol, parse_address
from kproxy_core.model.endpoint import Destination
from kproxy_ipvs.batch import Listed
from kproxy_ipvs.render import ServerKey

_DIRECTORY = Path("/proc/thread-self/net")
"""Of the network namespace of the calling thread."""

SERVERS = _DIRECTORY / "ip_vs"
CONNECTIONS = _DIRECTORY / "ip_vs_conn"

_PROTOCOLS = {protocol.name: protocol for protocol in Protocol}

_ENDED = frozenset({"TIME_WAIT", "CLOSE", "CLOSED", "REJECTED"})
"""States of TCP and SCTP connections in which nobody has anything to say any more."""


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


def unfinished(lines: Iterable[str]) -> Mapping[Destination, int]:
    """How many connections each real server has that may still carry data, from the lines of `CONNECTIONS`.

    UDP is left out, and so is what persistence remembers of clients: they have port 0.
    """
    found: dict[Destination, int] = {}
    for line in lines:
        words = line.split()
        if words[0] in ("TCP", "SCTP") and words[2] != "0000" and words[7] not in _ENDED:
            where = Destination(_address(words[5]), int(words[6], 16))
            found[where] = found.get(where, 0) + 1
    return found


def _socket(text: str) -> tuple[Address, int]:
    address, _, port = text.rpartition(":")
    return _address(address.strip("[]")), int(port, 16)


def _address(text: str) -> Address:
    return Address(bytes.fromhex(text)) if ":" not in text else parse_address(text)

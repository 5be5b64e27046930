"""Which local ports relays listen on, and sockets that keep others from a port (kube-proxy 1.25)."""

import errno
import random
import re
import socket

from kproxy_core.model.address import Address, Family, Protocol, format_address

_RANGE = re.compile(r"(\d{1,5})(?:([-+])(\d{1,5}))?")
_DISCARD = 9


class NoPort(Exception):
    """There is no port to listen on; the message says why."""


def parse_port_range(text: str) -> range | None:
    """The ports that ``a-b``, ``a+n`` or ``a`` name; None for no range: empty, 0 or 0-0.

    Raises ValueError.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        if text.strip():
            raise ValueError("must be a range of ports such as 10000-20000 or 10000+500")
        return None
    first = int(found[1])
    last = {None: first, "-": int(found[3] or 0), "+": first + int(found[3] or 0)}[found[2]]
    if first == last == 0:
        return None
    if not 0 < first <= last <= 65535:
        raise ValueError("must be within 1 to 65535, the first port not after the last")
    return range(first, last + 1)


class Holder:
    """A bound socket that serves nobody: the port is ours, and whoever comes meanwhile is refused."""

    def __init__(self, family: Family, protocol: Protocol, address: str, port: int, *, shared: bool) -> None:
        """*shared*: relay workers listen on the same port. Raises OSError."""
        udp = protocol is Protocol.UDP
        self._sock = socket.socket(family.af, socket.SOCK_DGRAM if udp else socket.SOCK_STREAM)
        try:
            if family is Family.IPV6:
                self._sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if shared and not udp:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind((address, port))
            if shared:
                # Not before: it would get a port that sockets of another relay, or of another process
                # of ours, are ready to share, and the kernel itself chooses such a port for UDP.
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.port: int = self._sock.getsockname()[1]
            if udp:
                # Connected to somebody who never sends, it takes no datagram from anybody.
                self._sock.connect((format_address(family.loopback), _DISCARD))
        except OSError:
            self._sock.close()
            raise

    def close(self) -> None:
        """Let the port go."""
        self._sock.close()


def hold(family: Family, protocol: Protocol, address: Address | None, port: int) -> Holder | None:
    """Keep everybody else from a node port, or from a port of a VIP; None if *address* is not local.

    Raises NoPort if somebody has it.
    """
    text = format_address(family.unspecified if address is None else address)
    try:
        return Holder(family, protocol, text, port, shared=False)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise NoPort(f"{protocol.name} port {port} of this node: {error.strerror}") from error


class Allocator:
    """Gives relays their ports, each only once."""

    def __init__(self, ports: range | None) -> None:
        self._ports = ports
        self._used: set[tuple[Family, Protocol, int]] = set()

    def open(self, family: Family, protocol: Protocol, address: Address | None, wanted: int = 0) -> Holder:
        """A port at *address* (None: all), *wanted* if that can be had. Raises NoPort."""
        text = format_address(family.unspecified if address is None else address)
        problem = "no remaining ports"
        for port in ([wanted] if wanted else []) + self._candidates():
            # Nothing keeps sockets of ours that do not listen from sharing one.
            if (family, protocol, port) in self._used:
                continue
            try:
                holder = Holder(family, protocol, text, port, shared=True)
            except OSError as error:
                problem = f"{protocol.name} {text} port {port}: {error.strerror}"
                continue
            self._used.add((family, protocol, holder.port))
            return holder
        raise NoPort(problem)

    def release(self, family: Family, protocol: Protocol, holder: Holder) -> None:
        """Nobody listens on the port of *holder* any more."""
        self._used.discard((family, protocol, holder.port))
        holder.close()

    def _candidates(self) -> list[int]:
        """All ports of the range, from somewhere in the middle on, or the kernel's choice."""
        if self._ports is None:
            return [0]
        offset = random.randrange(len(self._ports))
        return [*self._ports[offset:], *self._ports[:offset]]

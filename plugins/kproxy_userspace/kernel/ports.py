"""Local ports: those of relays, and reservations of the ports of frontends."""

import errno
import random
import socket
from collections.abc import Collection

from kproxy_core.contract import Address, Family, Frontend, Protocol, ServicePortKey, format_address

_DISCARD = 9


class NoPort(Exception):
    """No port is available, for the reason in the message."""


def bind_socket(
    family: Family, at: Frontend, *, shared: bool = False, joins: bool = False
) -> socket.socket:
    """Return a socket that is bound to *at* but serves nothing: clients are refused.

    If *shared*, relay workers may bind theirs beside it later; if it *joins*, they may have done so before.
    Raises OSError.
    """
    udp = at.protocol is Protocol.UDP
    sock = socket.socket(family.af, socket.SOCK_DGRAM if udp else socket.SOCK_STREAM)
    try:
        if family is Family.IPV6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if shared and not udp:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if joins:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((_text(family, at.address), at.port))
        if shared:
            # Set before bind(), it would also admit a port that another relay or process shares. For
            # UDP the kernel itself would choose such a port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if udp:
            # Connected to a port that never sends, the socket receives no datagram of any client.
            sock.connect((format_address(family.loopback), _DISCARD))
    except OSError:
        sock.close()
        raise
    return sock


class Reservations:
    """Sockets of one family that prevent other programs from binding the ports of frontends."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._held: dict[ServicePortKey, dict[Frontend, socket.socket | None]] = {}
        """None: no socket is needed or possible."""

    def keep_only(self, key: ServicePortKey, frontends: Collection[Frontend]) -> None:
        """Release the reservations of a service port that are not for *frontends*."""
        held = self._held.pop(key, {})
        for frontend in held.keys() - frontends:
            if sock := held.pop(frontend):
                sock.close()
        if held:
            self._held[key] = held

    def reserve(self, key: ServicePortKey, frontend: Frontend, *, beside_relays: bool = False) -> None:
        """Reserve the port of *frontend* for a service port. Raises NoPort if another program has it.

        *beside_relays*: the core's relays may have it, for the mode that served before or that serves next.
        """
        held = self._held.setdefault(key, {})
        if frontend not in held:
            held[frontend] = self._bind(frontend, joins=beside_relays)

    def release_all(self) -> None:
        for key in list(self._held):
            self.keep_only(key, ())

    def _bind(self, frontend: Frontend, *, joins: bool) -> socket.socket | None:
        try:
            return bind_socket(self._family, frontend, joins=joins)
        except OSError as error:
            # EADDRNOTAVAIL: another node's address, which no local program can bind. EACCES: a port below
            # 1024 without CAP_NET_BIND_SERVICE, which IPv6 reports for addresses of other nodes as well.
            if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES):
                return None
            where = f"{frontend.protocol.name} port {frontend.port} of this node"
            raise NoPort(f"{where}: {error.strerror}") from error


class RelayPorts:
    """The ports of one family's relays. No two relays share one."""

    def __init__(self, family: Family, ports: range | None) -> None:
        """Choose from *ports*; None: leave the choice to the kernel."""
        self._family = family
        self._ports = ports
        self._held: dict[tuple[Protocol, int], socket.socket] = {}

    def open(self, at: Frontend) -> int:
        """Bind a port at the address of *at*, its own port if possible, and return it. Raises NoPort."""
        problem = "no remaining ports"
        for port in ([at.port] if at.port else []) + self._candidates():
            # The kernel lets our sockets share a port as long as none listens.
            if (at.protocol, port) in self._held:
                continue
            try:
                sock = bind_socket(self._family, at._replace(port=port), shared=True)
            except OSError as error:
                address = _text(self._family, at.address)
                problem = f"{at.protocol.name} {address} port {port}: {error.strerror}"
                continue
            bound: int = sock.getsockname()[1]
            self._held[at.protocol, bound] = sock
            return bound
        raise NoPort(problem)

    def release(self, protocol: Protocol, port: int) -> None:
        """Release a relay's port after its listener was closed."""
        if sock := self._held.pop((protocol, port), None):
            sock.close()

    def _candidates(self) -> list[int]:
        """Return all ports of the range from a random one on; 0 for the kernel's choice."""
        if self._ports is None:
            return [0]
        offset = random.randrange(len(self._ports))
        return [*self._ports[offset:], *self._ports[:offset]]


def _text(family: Family, address: Address | None) -> str:
    return format_address(family.unspecified if address is None else address)

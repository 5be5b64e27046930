"""Endpoints that send their names, and clients for them."""

import contextlib
import socket
import threading
from collections.abc import Iterator

from tests.patience import PATIENCE


class Endpoint:
    """Answers a connection with its name, then echoes; a datagram with its name and the datagram."""

    def __init__(self, host: str, port: int) -> None:
        self.name = f"{host}:{port};".encode()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tcp = socket.create_server((host, port), family=family, backlog=256)
        self._udp = socket.socket(family, socket.SOCK_DGRAM)
        self._udp.bind((host, port))
        self.flows: set[object] = set()
        """Sources of datagrams."""
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._accept, self._answer)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads before the descriptors, which other sockets get, are closed."""
        for sock in (self._tcp, self._udp):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._tcp, self._udp):
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._tcp.accept()
                threading.Thread(target=self._echo, args=[client], daemon=True).start()

    def _echo(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.sendall(self.name)
            while data := client.recv(1 << 16):
                client.sendall(data)

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, sender = self._udp.recvfrom(1 << 16)
                if sender is None:  # closed
                    return
                self.flows.add(sender)
                self._udp.sendto(self.name + data, sender)


@contextlib.contextmanager
def endpoints(*where: tuple[str, int]) -> Iterator[list[Endpoint]]:
    made: list[Endpoint] = []
    try:
        for host, port in where:
            made.append(Endpoint(host, port))
        yield made
    finally:
        for one in made:
            one.close()


def connect(host: str, port: int, source: str = "") -> socket.socket:
    return socket.create_connection((host, port), PATIENCE, (source, 0) if source else None)


def name_of(sock: socket.socket) -> str:
    """Return the name of the endpoint at the other end."""
    name = b""
    while not name.endswith(b";"):
        try:
            part = sock.recv(1)
        except TimeoutError as error:
            raise TimeoutError(f"timed out after {name!r}") from error
        if not part:
            raise ConnectionError("hung up before saying a name")
        name += part
    return name[:-1].decode()


def reached(host: str, port: int, source: str = "") -> str:
    """Return the name of the endpoint that answers a new connection."""
    with connect(host, port, source) as sock:
        return name_of(sock)


def datagram(sock: socket.socket, data: bytes, host: str, port: int) -> str:
    """Return the name of the endpoint that answers *data*, and check the answer's source and content."""
    sock.settimeout(PATIENCE)
    sock.sendto(data, (host, port))
    answer, sender = sock.recvfrom(1 << 16)
    assert sender[:2] == (host, port)
    name, _, echoed = answer.partition(b";")
    assert echoed == data
    return name.decode()

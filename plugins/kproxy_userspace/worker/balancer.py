"""Round robin over the endpoints of one service port, with ClientIP affinity (kube-proxy 1.25, roundrobin).

Pure: the caller supplies the time and the randomness. Unlike in kube-proxy, the affinity timeout follows the
Service.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kproxy_userspace.names import Endpoint


class Clients(dict[str, tuple[Endpoint, float]]):
    """The endpoints of clients with affinity, and the times of their last connections."""

    __slots__ = ("__weakref__",)


class Affinity(NamedTuple):
    seconds: int
    clients: Clients
    """Shared by the relays of one service port, whose frontends lead a client to the same endpoint."""


class Balancer:
    """Hands out endpoints in turn. A client with affinity keeps its own until it is removed or times out."""

    def __init__(self, shuffle: Callable[[list[Endpoint]], None]) -> None:
        self.endpoints: list[Endpoint] = []
        self._shuffle = shuffle
        self._next = 0
        self._affinity: Affinity | None = None
        self._may_keep: frozenset[Endpoint] = frozenset()
        """Endpoints that a client may keep: one that another relay remembered may not be among this one's."""

    def set_endpoints(self, endpoints: Sequence[Endpoint], affinity: Affinity | None) -> list[Endpoint]:
        """Use these *endpoints* from now on. Return the removed ones."""
        wanted = frozenset(endpoints)
        self._affinity = affinity
        self._may_keep = wanted if affinity else frozenset()
        removed = [endpoint for endpoint in self.endpoints if endpoint not in wanted]
        if removed or len(wanted) != len(self.endpoints):
            self.endpoints = list(endpoints)
            self._shuffle(self.endpoints)
            self._next = 0
        return removed

    def choose(self, client: str, now: float, *, is_retry: bool = False) -> Endpoint | None:
        """Return the endpoint for *client*, None without endpoints. A retry never takes the kept one."""
        endpoints = self.endpoints
        if not endpoints:
            return None
        affinity = self._affinity
        if affinity and not is_retry:
            kept = self.kept(client, now)
            if kept is not None:
                affinity.clients[client] = (kept, now)
                return kept
        chosen = endpoints[self._next]
        self._next += 1
        if self._next == len(endpoints):
            self._next = 0
            if affinity:  # Clients that return in the same order must not get the same again.
                self._shuffle(endpoints)
        if affinity:
            affinity.clients[client] = (chosen, now)
        return chosen

    def kept(self, client: str, now: float) -> Endpoint | None:
        """Return the endpoint that affinity gives *client*."""
        if self._affinity is None:
            return None
        endpoint, since = self._affinity.clients.get(client, (None, 0.0))
        return endpoint if endpoint in self._may_keep and now - since < self._affinity.seconds else None

    def forget_expired(self, now: float) -> None:
        """Drop the clients whose affinity has timed out."""
        if self._affinity is not None:
            seconds, clients = self._affinity
            for client in [client for client, (_, since) in clients.items() if now - since >= seconds]:
                del clients[client]

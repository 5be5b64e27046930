"""Round robin over the endpoints of one service port, with ClientIP affinity (kube-proxy 1.25, roundrobin).

Pure: the caller supplies the time and the randomness. Unlike in kube-proxy, the affinity timeout follows the
Service.
"""

from collections.abc import Callable, Sequence

from kproxy_core.linux.relay.orders import Endpoint


class Clients(dict[str, tuple[Endpoint, float]]):
    """The endpoints of clients with affinity, and the times of their last connections.

    Shared by the relays of one service port: all of its frontends give a client the same endpoint.
    """

    __slots__ = ("__weakref__", "seconds")

    def __init__(self, seconds: int) -> None:
        super().__init__()
        self.seconds = seconds
        """The affinity timeout."""

    def forget_expired(self, now: float) -> None:
        """Drop the clients whose affinity has timed out."""
        for client in [client for client, (_, since) in self.items() if now - since >= self.seconds]:
            del self[client]


class Balancer:
    """Chooses endpoints in turn. A client with affinity keeps its own until it is removed or times out."""

    def __init__(self, shuffle: Callable[[list[Endpoint]], None]) -> None:
        self.endpoints: list[Endpoint] = []
        self._shuffle = shuffle
        self._next = 0
        self._clients: Clients | None = None
        self._may_keep: frozenset[Endpoint] = frozenset()
        """Endpoints that a client may keep: another relay may have remembered one that this relay lacks."""

    def set_endpoints(self, endpoints: Sequence[Endpoint], clients: Clients | None) -> list[Endpoint]:
        """Use these *endpoints* from now on; no *clients*: without affinity. Return the removed ones."""
        wanted = frozenset(endpoints)
        self._clients = clients
        self._may_keep = frozenset() if clients is None else wanted
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
        clients = self._clients
        if clients is not None and not is_retry:
            kept = self.kept(client, now)
            if kept is not None:
                clients[client] = (kept, now)
                return kept
        chosen = endpoints[self._next]
        self._next += 1
        if self._next == len(endpoints):
            self._next = 0
            if clients is not None:  # Clients that return in the same order must not get the same again.
                self._shuffle(endpoints)
        if clients is not None:
            clients[client] = (chosen, now)
        return chosen

    def kept(self, client: str, now: float) -> Endpoint | None:
        """Return the endpoint of the affinity of *client*."""
        if self._clients is None:
            return None
        endpoint, since = self._clients.get(client, (None, 0.0))
        return endpoint if endpoint in self._may_keep and now - since < self._clients.seconds else None

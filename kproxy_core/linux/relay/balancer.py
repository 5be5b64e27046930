"""Round robin over the slots of one service port, with ClientIP affinity (kube-proxy 1.25, roundrobin).

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
    """Chooses endpoints in turn, or by a hash of the client. A client with affinity keeps its own until it is
    removed or times out.
    """

    def __init__(self, shuffle: Callable[[list[Endpoint]], None]) -> None:
        self.endpoints: list[Endpoint] = []
        """The endpoint of each slot."""
        self._resting: Sequence[Endpoint] = ()
        self._hash_by = ""
        self._shuffle = shuffle
        self._next = 0
        self._clients: Clients | None = None
        self._may_keep: frozenset[Endpoint] = frozenset()
        """Endpoints that a client may keep: another relay may have remembered one that this relay lacks."""

    def set_endpoints(
        self, endpoints: Sequence[Endpoint], clients: Clients | None, resting: Sequence[Endpoint] = (),
        hash_by: str = "",
    ) -> list[Endpoint]:
        """Use the *endpoints* of these slots from now on; no *clients*: without affinity.

        Return the removed ones, which are not *resting* either.
        """
        wanted = frozenset(endpoints)
        self._clients = clients
        self._may_keep = frozenset() if clients is None else wanted
        present = wanted.union(resting)
        removed = [each for each in dict.fromkeys([*self.endpoints, *self._resting]) if each not in present]
        self._resting, self._hash_by = resting, hash_by
        if hash_by:
            self.endpoints = list(endpoints)
            self._next = 0
        elif sorted(endpoints) != sorted(self.endpoints):
            self.endpoints = list(endpoints)
            self._shuffle(self.endpoints)
            self._next = 0
        return removed

    def choose(self, client: str, now: float, *, is_retry: bool = False, port: int = 0) -> Endpoint | None:
        """Return the endpoint for *client*, at *port*; None without endpoints.

        A retry never takes the kept one, nor the slot by the hash.
        """
        endpoints = self.endpoints
        if not endpoints:
            return None
        clients = self._clients
        if clients is not None and not is_retry:
            kept = self.kept(client, now)
            if kept is not None:
                clients[client] = (kept, now)
                return kept
        if self._hash_by and not is_retry:
            chosen = endpoints[self._slot(client, port)]
        else:
            chosen = endpoints[self._next]
            self._next += 1
            if self._next == len(endpoints):
                self._next = 0
                # Clients that return in the same order must not get the same again.
                if clients is not None and not self._hash_by:
                    self._shuffle(endpoints)
        if clients is not None:
            clients[client] = (chosen, now)
        return chosen

    def _slot(self, client: str, port: int) -> int:
        # Most workers have no Service that needs these.
        from kproxy_core.model.address import parse_address
        from kproxy_core.plan.hashing import slot_of

        address = parse_address(client.partition("%")[0])
        return slot_of(address, port if self._hash_by == "flow" else None, len(self.endpoints))

    def kept(self, client: str, now: float) -> Endpoint | None:
        """Return the endpoint of the affinity of *client*."""
        if self._clients is None:
            return None
        endpoint, since = self._clients.get(client, (None, 0.0))
        return endpoint if endpoint in self._may_keep and now - since < self._clients.seconds else None

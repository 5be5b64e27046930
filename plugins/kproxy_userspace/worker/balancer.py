"""Round robin over the endpoints of one service port, with ClientIP affinity (kube-proxy 1.25, roundrobin).

Pure: the caller supplies the time and the randomness. Unlike in kube-proxy, the affinity timeout follows the
Service.
"""

from collections.abc import Callable, Sequence

from kproxy_userspace.names import Endpoint


class Balancer:
    """Hands out endpoints in turn. A client with affinity keeps its own until it is removed or times out."""

    def __init__(self, shuffle: Callable[[list[Endpoint]], None]) -> None:
        self.endpoints: list[Endpoint] = []
        self._shuffle = shuffle
        self._next = 0
        self._affinity_seconds = 0
        self._clients: dict[str, tuple[Endpoint, float]] = {}

    def set_endpoints(self, endpoints: Sequence[Endpoint], affinity_seconds: int) -> list[Endpoint]:
        """Use these *endpoints* from now on. Return the removed ones."""
        self._affinity_seconds = affinity_seconds
        if not affinity_seconds:
            self._clients.clear()
        wanted = set(endpoints)
        removed = [endpoint for endpoint in self.endpoints if endpoint not in wanted]
        if removed or len(wanted) != len(self.endpoints):
            self.endpoints = list(endpoints)
            self._shuffle(self.endpoints)
            self._next = 0
            if removed:
                self._clients = {c: kept for c, kept in self._clients.items() if kept[0] in wanted}
        return removed

    def choose(self, client: str, now: float, *, is_retry: bool = False) -> Endpoint | None:
        """Return the endpoint for *client*, None without endpoints. A retry never takes the kept one."""
        endpoints = self.endpoints
        if not endpoints:
            return None
        if self._affinity_seconds and not is_retry:
            kept = self.kept(client, now)
            if kept is not None:
                self._clients[client] = (kept, now)
                return kept
        chosen = endpoints[self._next]
        self._next += 1
        if self._next == len(endpoints):
            self._next = 0
            if self._affinity_seconds:  # Clients that return in the same order must not get the same again.
                self._shuffle(endpoints)
        if self._affinity_seconds:
            self._clients[client] = (chosen, now)
        return chosen

    def kept(self, client: str, now: float) -> Endpoint | None:
        """Return the endpoint that affinity gives *client*."""
        endpoint, since = self._clients.get(client, (None, 0.0))
        return endpoint if now - since < self._affinity_seconds else None

    def forget_expired(self, now: float) -> None:
        """Drop the clients whose affinity has timed out."""
        limit = now - self._affinity_seconds
        if self._clients:
            self._clients = {c: kept for c, kept in self._clients.items() if kept[1] > limit}

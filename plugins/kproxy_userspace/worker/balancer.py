"""Round robin over the endpoints of one service port, with ClientIP affinity (kube-proxy 1.25, roundrobin).

Pure: the caller brings the time and the chance. Unlike kube-proxy the affinity timeout follows the Service.
"""

from collections.abc import Callable, Sequence

from kproxy_userspace.names import Endpoint


class Balancer:
    """Hands out endpoints in turn; a client with affinity keeps its own until that is gone or timed out."""

    def __init__(self, shuffle: Callable[[list[Endpoint]], None]) -> None:
        self.endpoints: list[Endpoint] = []
        self._shuffle = shuffle
        self._next = 0
        self._affinity_seconds = 0
        self._clients: dict[str, tuple[Endpoint, float]] = {}

    def set(self, endpoints: Sequence[Endpoint], affinity_seconds: int) -> list[Endpoint]:
        """Use these from now on; returns those that are no longer among them."""
        self._affinity_seconds = affinity_seconds
        if not affinity_seconds:
            self._clients.clear()
        wanted = set(endpoints)
        gone = [endpoint for endpoint in self.endpoints if endpoint not in wanted]
        if gone or len(wanted) != len(self.endpoints):
            self.endpoints = list(endpoints)
            self._shuffle(self.endpoints)
            self._next = 0
            if gone:
                self._clients = {c: kept for c, kept in self._clients.items() if kept[0] in wanted}
        return gone

    def choose(self, client: str, now: float, *, anew: bool = False) -> Endpoint | None:
        """The endpoint for *client*; None if there is none. *anew*: the one it keeps does not answer."""
        endpoints = self.endpoints
        if not endpoints:
            return None
        if self._affinity_seconds and not anew:
            kept = self._clients.get(client)
            if kept is not None and now - kept[1] < self._affinity_seconds:
                self._clients[client] = (kept[0], now)
                return kept[0]
        chosen = endpoints[self._next]
        self._next += 1
        if self._next == len(endpoints):
            self._next = 0
            if self._affinity_seconds:  # Else clients that return in the order they came get what they had.
                self._shuffle(endpoints)
        if self._affinity_seconds:
            self._clients[client] = (chosen, now)
        return chosen

    def forget_stale(self, now: float) -> None:
        """Drop the clients whose time is over."""
        limit = now - self._affinity_seconds
        if self._clients:
            self._clients = {c: kept for c, kept in self._clients.items() if kept[1] > limit}

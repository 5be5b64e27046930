"""UDP flows that connection tracking still leads to relays once no portal does. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from kproxy_core.model.address import Protocol
from kproxy_core.plan.stale_flows import Socket
from kproxy_userspace.batch import Redirect


@dataclass(frozen=True, slots=True)
class RelayedFlows:
    """The flows of these portals that these relays answer."""

    ports: frozenset[int]
    """What the clients dial."""
    relays: frozenset[int]

    @classmethod
    def of(cls, redirects: Iterable[Redirect]) -> Self:
        """Those of the portals for UDP."""
        udp = [(portal.port, relay) for portal, relay, _ in redirects if portal.protocol is Protocol.UDP]
        return cls(frozenset(port for port, _ in udp), frozenset(relay for _, relay in udp))

    def is_stale(self, destination: Socket, answered_by: Socket) -> bool:
        """Whether the flow to *destination* is answered by a relay."""
        return answered_by[1] in self.relays and answered_by != destination

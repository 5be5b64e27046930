"""The stage of a packet check: the backend on a node with pods, another node and a client."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from kproxy_core.backend.instance import BackendInstance
from kproxy_core.model.address import Family, Protocol, format_address, parse_address
from kproxy_core.testing.builders import endpoint, endpoint_slice, full_update, plans, service
from kproxy_core.testing.conformance import dialing, kernel_state
from kproxy_core.testing.conformance.bench import inside
from kproxy_core.testing.conformance.checks import Check, Failed, NotApplicable
from kproxy_core.testing.conformance.dialing import Answer, Connection, Frontend
from kproxy_core.testing.conformance.features import ADDRESSES, Plans
from kproxy_core.testing.conformance.network import PORT, Network, network
from kproxy_core.testing.conformance.subject import Subject, Wanted, change, full

_TRIES, _MOST_TRIES = 12, 100
"""New connections to find out who answers, and until each of several endpoints has answered."""


class Play:
    """One subject on the node of a network."""

    def __init__(self, subject: Subject, around: Network, family: Family) -> None:
        self.subject = subject
        self.family = family
        self.at = ADDRESSES[family]
        self._hosts = around.hosts
        self._plans: Plans = {}
        self._shown: Plans = {}
        self.instance: BackendInstance = subject.start()
        full(self.instance, family, {})

    def serve(
        self, name: str, *ports: str, to: str = "near other far", number: int = 1, **options: object
    ) -> None:
        """Have the backend serve this Service from now on, by pods *to*; *number* gives it its addresses.

        *options* are those of `builders.service`.
        """
        ports = ports or ("80",)
        made = service(name, *ports, ip=self.at.cluster_ip(number), **options)  # type: ignore[arg-type]
        places = {
            "near": (self.at.near[0], "node1"),
            "other": (self.at.near[1], "node1"),
            "far": (self.at.far, "node2"),
        }
        chosen = [endpoint(*places[pod]) for pod in to.split()]
        inner = [
            f"{spec.rpartition(':')[0] + ':' if ':' in spec else ''}{PORT}{'/UDP' * ('UDP' in spec)}"
            for spec in ports
        ]
        piece = endpoint_slice(name, *chosen, ports=inner, family=self.family)
        self._bring(name, plans(self.at.view(), made, piece))

    def remove(self, name: str) -> None:
        """Delete the Service."""
        self._bring(name, {})

    def have_successor(self) -> None:
        """Keep address translation enabled, as another mode would."""
        kernel_state.translate_addresses()

    def begin(self) -> None:
        """Start a new process over the existing rules."""
        self.instance = self.subject.start()
        full(self.instance, self.family, self._plans)

    def count_traffic(self) -> None:
        """Start a new backend, which counts connections. Raises NotApplicable if it cannot."""
        self.subject.end(self.instance)
        self.subject.settings = replace(self.subject.settings, count_traffic=True)
        self.begin()
        if self.instance.traffic(self.family) is None:
            raise NotApplicable("the backend does not implement kproxy_traffic")

    def traffic(self) -> dict[tuple[Frontend, str], int]:
        """Return the counted connections of each frontend, a node port's at the node's address, and pod."""
        pods = {parse_address(address): name for name, address in (
            ("near", self.at.near[0]), ("other", self.at.near[1]), ("far", self.at.far))}
        found: dict[tuple[Frontend, str], int] = {}
        for (address, protocol, port), where, count in self.instance.traffic(self.family) or ():
            dialled = format_address(address) if address is not None else self.at.node
            key = Frontend(dialled, port, protocol), pods[where.address] if where is not None else ""
            found[key] = found.get(key, 0) + count
        return found

    def _bring(self, name: str, found: Plans) -> None:
        before = {key: plan for key, plan in self._plans.items() if key.name == name}
        for key in before:
            del self._plans[key]
        self._plans.update(found)
        self._shown.update(found)
        change(self.instance, self.family, self._plans, {**before, **found})

    def announced(self) -> str:
        """Return the backend's caveats about the Services; "" without any."""
        subject, update = self.subject, full_update(self.at.view(), self._shown)
        caveats = subject.registry.caveats(subject.mode, update, subject.settings)
        return "; ".join(dict.fromkeys(caveat.what for caveat in caveats if caveat.lost))

    # Frontends -------------------------------------------------------------------------------

    def cluster_ip(self, port: int = 80, protocol: Protocol = Protocol.TCP, number: int = 1) -> Frontend:
        return Frontend(self.at.cluster_ip(number), port, protocol)

    def node_port(self, port: int, protocol: Protocol = Protocol.TCP) -> Frontend:
        return Frontend(self.at.node, port, protocol)

    def external(self, number: int, port: int = 80) -> Frontend:
        return Frontend(self.at.external_ip(number), port)

    # Clients ---------------------------------------------------------------------------------

    def ask(self, host: str, frontend: Frontend, source: str = "") -> Answer:
        """Return the answer to a new connection from *host* (see `network.Network`)."""
        if host == "client":
            source = source or self.at.clients[0]
        return dialing.ask(self._hosts[host], frontend, source)

    def ask_often(self, host: str, frontend: Frontend, source: str = "", tries: int = _TRIES) -> list[Answer]:
        return [self.ask(host, frontend, source) for _ in range(tries)]

    def reaches(self, host: str, frontend: Frontend, *pods: str) -> None:
        """Fail unless exactly these pods answer new connections from *host*."""
        found = {answer.by for answer in self.ask_often(host, frontend)}
        for _ in range(_TRIES, _MOST_TRIES):
            if not set(pods) - found:
                break
            found.add(self.ask(host, frontend).by)
        if found != set(pods):
            wanted = ", ".join(pods)
            raise Failed(
                f"from {host} to {frontend}: answered by {', '.join(sorted(found))}, not by {wanted}"
            )

    def connection(self, host: str, frontend: Frontend) -> "contextlib.AbstractContextManager[Connection]":
        return dialing.connection(self._hosts[host], frontend)

    def refused(self, host: str, frontend: Frontend) -> None:
        dialing.refused(self._hosts[host], frontend)

    def unanswered(self, host: str, frontend: Frontend, source: str = "", *, silent: bool = False) -> None:
        dialing.unanswered(self._hosts[host], frontend, source, silent=silent)


@contextlib.contextmanager
def play(wanted: Wanted, family: Family) -> Iterator[Play]:
    """Yield a play in a new network, and move the calling thread to the node for the ``with`` block."""
    with network() as around, inside(around.hosts["node"], wanted):
        subject = Subject(wanted)
        try:
            yield Play(subject, around, family)
        finally:
            subject.end_all()


def run_check(check: Check, wanted: Wanted, family: Family) -> None:
    """Play a scenario. An expected failure is NotApplicable if a caveat of the backend explains it."""
    with play(wanted, family) as made:
        try:
            check.run(made)
        except Failed as failure:
            announced = made.announced()
            if not announced:
                raise
            if check.name in wanted.not_applicable:
                raise NotApplicable(f"the backend announces: {announced}") from failure
            hint = f"The backend announces: {announced}. If that is why, say so in kproxy_not_applicable."
            raise Failed(f"{failure}\n{hint}") from failure.__cause__

"""No two relays share a port."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kproxy_core.linux.relay.worker import listening_socket
from kproxy_core.model.address import Family, Protocol
from kproxy_core.plan.service_plan import Frontend
from kproxy_userspace.kernel.ports import NoPort, RelayPorts

FEW = range(40000, 40010)


@pytest.fixture(autouse=True)
def _few_ports(node: None) -> None:
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{FEW[0]} {FEW[-1]}")


@contextmanager
def relays(opened: RelayPorts, protocol: Protocol) -> Iterator[list[int]]:
    """Open as many relays as possible, with two workers each, and return their ports."""
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) <= len(FEW):
            try:
                port = opened.open(Frontend(None, protocol, 0))
            except NoPort:
                break
            stack.callback(opened.release, protocol, port)
            ports.append(port)
            for _ in range(2):
                sock = stack.enter_context(listening_socket(protocol is Protocol.UDP, "0.0.0.0", port))
                if protocol is Protocol.TCP:
                    sock.listen()
        yield ports


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
@pytest.mark.parametrize("wanted", [None, FEW])
def test_no_two_relays_share_a_port(protocol: Protocol, wanted: range | None) -> None:
    with relays(RelayPorts(Family.IPV4, wanted), protocol) as ports:
        assert sorted(ports) == list(FEW)
        with pytest.raises(NoPort):  # nor do those of a backend that retires and its successor
            RelayPorts(Family.IPV4, wanted).open(Frontend(None, protocol, 0))

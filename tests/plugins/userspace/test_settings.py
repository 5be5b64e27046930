"""Options of the mode, and the ports that they allow."""

import socket

import pytest

from kproxy_core.contract.errors import InvalidOption
from kproxy_core.contract.values import BackendSettings
from kproxy_core.linux.relay.orders import WorkerSettings
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend
from kproxy_userspace.kernel.ports import NoPort, RelayPorts, Reservations, bind_socket
from kproxy_userspace.settings import FOREVER, Settings, parse_port_range, read_settings
from tests.patience import PATIENCE

V4, TCP, UDP = Family.IPV4, Protocol.TCP, Protocol.UDP
KEY = ServicePortKey("default", "web", "http", TCP)


def settings(**options: object) -> Settings:
    return read_settings(BackendSettings((V4,), options=options))


def test_defaults_are_kube_proxys() -> None:
    assert settings() == Settings(None, None, None, WorkerSettings(0.25, FOREVER, 3600.0), 0, 30.0)


def test_options_are_read() -> None:
    assert settings(
        listen="127.0.0.1", portRange="30000+10", udpIdleTimeout="1.5s", removedEndpoints="drain",
        drainTimeout="1m", workers=3, syncPeriod="5s", halfClosedTimeout="2m",
    ) == Settings(
        parse_address("127.0.0.1"), None, range(30000, 30011), WorkerSettings(1.5, 60.0, 120.0), 3, 5.0
    )
    assert settings(removedEndpoints="close").of_workers.drain == 0


def test_durations_have_the_syntax_of_go() -> None:
    idle = settings(udpIdleTimeout="1m1.5s").of_workers.udp_idle
    assert idle == 61.5
    assert str(idle) == "61.5"  # As workers read it.


def test_the_bind_address_is_used_in_its_family() -> None:
    assert settings(bindAddress="0.0.0.0").bind is None
    bound = settings(bindAddress="192.0.2.1")
    assert bound.bind_in(V4) == parse_address("192.0.2.1")
    assert bound.bind_in(Family.IPV6) is None
    assert settings(bindAddress="127.0.0.1", listen="127.0.0.1").listen  # without portals that works


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("bindAddress", "here"), ("bindAddress", "::1"), ("udpIdleTimeout", "1m1"),
        ("listen", "localhost"), ("portRange", "9-1"), ("udpIdleTimeout", "0s"), ("udpIdleTimeout", "soon"),
        ("removedEndpoints", "kill"), ("drainTimeout", -1), ("workers", "two"), ("workers", -1),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_option(option: str, value: object) -> None:
    with pytest.raises(InvalidOption, match=f"{option}: {value!r}"):
        settings(**{option: value})


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("", None), ("0", None), ("0-0", None), ("10-12", range(10, 13)), ("10+2", range(10, 13)),
        ("10", range(10, 11)), ("65535", range(65535, 65536)),
    ],
)  # fmt: skip
def test_port_ranges(text: str, ports: range | None) -> None:
    assert parse_port_range(text) == ports


@pytest.mark.parametrize("text", ["5-4", "0-5", "65530+9", "70000", "a-b", "1-2-3", "-5"])
def test_an_invalid_port_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_port_range(text)


@pytest.mark.usefixtures("node")
def test_each_port_of_the_range_is_used_once_until_released() -> None:
    ports, anywhere = RelayPorts(V4, range(20000, 20003)), Frontend(None, TCP, 0)
    taken = [ports.open(anywhere) for _ in range(3)]
    assert set(taken) == {20000, 20001, 20002}
    with pytest.raises(NoPort, match="no remaining ports"):
        ports.open(anywhere)
    ports.release(TCP, taken[1])
    assert ports.open(anywhere) == taken[1]
    for port in taken:
        ports.release(TCP, port)


def ask(client: socket.socket) -> None:
    client.connect(("127.0.0.1", 30080))
    client.send(b"?")
    client.recv(1)


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_reserved_port_is_taken_and_refuses_clients(protocol: Protocol) -> None:
    one, other = Reservations(V4), Reservations(V4)
    frontend = Frontend(None, protocol, 30080)
    one.reserve(KEY, frontend)
    kind = socket.SOCK_DGRAM if protocol is UDP else socket.SOCK_STREAM
    with pytest.raises(NoPort, match="port 30080 of this node"):
        other.reserve(KEY, frontend)
    with socket.socket(socket.AF_INET, kind) as client:
        client.settimeout(PATIENCE)
        with pytest.raises(ConnectionRefusedError):
            ask(client)
    one.release_all()
    bind_socket(V4, frontend, shared=False).close()


@pytest.mark.usefixtures("node")
def test_addresses_of_other_nodes_are_not_reserved() -> None:
    reservations = Reservations(V4)
    reservations.reserve(KEY, Frontend(parse_address("10.96.0.1"), TCP, 80))
    other = Reservations(V4)
    other.reserve(KEY, Frontend(None, TCP, 80))
    with pytest.raises(NoPort):
        reservations.reserve(KEY, Frontend(parse_address("192.0.2.1"), TCP, 80))
    other.release_all()

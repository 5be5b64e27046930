"""The options of the mode, and the ports they allow."""

import socket

import pytest

from kproxy_core.backend.api import BackendSettings
from kproxy_core.backend.errors import Unsupported
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_userspace.kernel.ports import Allocator, Holder, NoPort, hold, parse_port_range
from kproxy_userspace.settings import FOR_EVER, Settings, read_settings

V4, TCP, UDP = Family.IPV4, Protocol.TCP, Protocol.UDP


def settings(**options: object) -> Settings:
    return read_settings(BackendSettings((V4,), options=options))


def test_defaults_are_kube_proxys() -> None:
    assert settings() == Settings(None, None, None, 0.25, FOR_EVER, 0, 30.0)


def test_what_is_said_is_taken() -> None:
    assert settings(
        listen="127.0.0.1", portRange="30000+10", udpIdleTimeout="1.5s", removedEndpoints="drain",
        drainTimeout="1m", workers=3, syncPeriod="5s",
    ) == Settings(parse_address("127.0.0.1"), None, range(30000, 30011), 1.5, 60.0, 3, 5.0)
    assert settings(removedEndpoints="close").drain_seconds == 0


def test_durations_are_gos() -> None:
    assert settings(udpIdleTimeout="1m1.5s").udp_idle_seconds == 61.5


def test_where_relays_listen() -> None:
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
    with pytest.raises(Unsupported, match=f"userspace.{option}: {value!r}"):
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
def test_what_is_no_port_range(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_port_range(text)


@pytest.mark.usefixtures("node")
def test_ports_come_from_the_range_each_once_and_again_when_free() -> None:
    ports = Allocator(range(20000, 20003))
    taken = [ports.open(V4, TCP, None) for _ in range(3)]
    assert {holder.port for holder in taken} == {20000, 20001, 20002}
    with pytest.raises(NoPort, match="no remaining ports"):
        ports.open(V4, TCP, None)
    ports.release(V4, TCP, taken[1])
    again = ports.open(V4, TCP, None)
    assert again.port == taken[1].port
    for holder in (taken[0], again, taken[2]):
        ports.release(V4, TCP, holder)


def ask(client: socket.socket) -> None:
    client.connect(("127.0.0.1", 30080))
    client.send(b"?")
    client.recv(1)


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_held_port_is_nobodys_and_refuses(protocol: Protocol) -> None:
    holder = hold(V4, protocol, None, 30080)
    assert holder is not None
    kind = socket.SOCK_DGRAM if protocol is UDP else socket.SOCK_STREAM
    with pytest.raises(NoPort, match="port 30080 of this node"):
        hold(V4, protocol, None, 30080)
    with socket.socket(socket.AF_INET, kind) as client:
        client.settimeout(5)
        with pytest.raises(ConnectionRefusedError):
            ask(client)
    holder.close()
    Holder(V4, protocol, "0.0.0.0", 30080, shared=False).close()


@pytest.mark.usefixtures("node")
def test_what_is_not_this_nodes_is_not_held() -> None:
    assert hold(V4, TCP, parse_address("10.96.0.1"), 80) is None

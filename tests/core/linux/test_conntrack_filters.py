"""Filters of announcements, tried with flows of every kind."""

import socket
import struct

import pytest

from kproxy_core.linux import conntrack_events
from kproxy_core.model.address import Family
from kproxy_core.netlink.messages import NETLINK_NETFILTER
from kproxy_core.netlink.sockets import NetlinkSocket
from tests.core.namespaces import Namespace, namespace

_DESTROYED = 3
_RESET = struct.pack("ii", 1, 0)
_SERVER, _VIP = {Family.IPV4: "192.0.2.2", Family.IPV6: "2001:db8::2"}, {Family.IPV4: "192.0.2.3",
                                                                          Family.IPV6: "2001:db8::3"}
_DIRECT, _SERVICE, _OTHER_PORT = 8080, 80, 81


def lead_to_server(inside: Namespace, family: Family) -> None:
    """Translate two ports of the VIP to the server, and one of the server's to another."""
    server, prefix = _SERVER[family], 8 * family.size
    inside.ip(*(f"address add {address}/{prefix} dev lo" for address in (server, _VIP[family])))
    to = f"[{server}]" if family is Family.IPV6 else server
    rules = [
        f"{family.ip} daddr {_VIP[family]} {protocol} dport {_SERVICE} dnat to {to}:{_DIRECT}"
        for protocol in ("tcp", "udp")
    ] + [f"{family.ip} daddr {server} tcp dport {_OTHER_PORT} dnat to {to}:{_DIRECT}"]
    inside.nft("\n".join([
        f"add table {family.ip} lab",
        f"add chain {family.ip} lab nat {{ type nat hook output priority -100; }}",
        *(f"add rule {family.ip} lab nat {rule}" for rule in rules), "",
    ]))  # fmt: skip


def connect(family: Family) -> None:
    """Open and end connections and flows of every kind."""
    af = socket.AF_INET6 if family is Family.IPV6 else socket.AF_INET
    with socket.create_server((_SERVER[family], _DIRECT), family=af) as listener:
        for reset in (False, True):
            for address, port in ((_SERVER, _DIRECT), (_VIP, _SERVICE), (_SERVER, _OTHER_PORT)):
                with socket.create_connection((address[family], port)) as client:
                    served = listener.accept()[0]
                    if reset:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                served.close()
    with socket.socket(af, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", (_SERVER[family], _DIRECT))
        client.sendto(b"x", (_VIP[family], _SERVICE))


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_only_wanted_ends_of_flows_are_received(family: Family) -> None:
    tcp, udp = socket.IPPROTO_TCP, socket.IPPROTO_UDP
    wanted = {
        conntrack_events.RESETS: [(tcp, _SERVICE), (tcp, _OTHER_PORT), (tcp, _DIRECT)],
        conntrack_events.TRANSLATED: [*[(tcp, _SERVICE), (tcp, _OTHER_PORT)] * 2, (udp, _SERVICE)],
    }
    with namespace() as inside:
        lead_to_server(inside, family)
        sockets = inside.inside(lambda: {accept: NetlinkSocket.open(
            NETLINK_NETFILTER, groups=(_DESTROYED,), accept=accept) for accept in wanted})
        inside.inside(lambda: connect(family))
        inside.run("conntrack", "-F", "-f", family.label.lower())
        for accept, sock in sockets.items():
            with sock:
                found = [
                    (event.protocol, event.original.port)
                    for data in iter(sock.receive, b"") for event in conntrack_events.parse(data)
                ]
            assert sorted(found) == sorted(wanted[accept])

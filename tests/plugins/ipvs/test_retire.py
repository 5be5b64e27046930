"""Retirement: parsing of /proc, and decisions about which objects connections need."""

import pytest

from kproxy_core.linux.conntrack import UdpFlow
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.model.service import Destination
from kproxy_core.plan.service_plan import Frontend
from kproxy_ipvs import names
from kproxy_ipvs.batch import DeleteDestination, DeleteServer, Operation, PutDestination, RealServer
from kproxy_ipvs.kernel import connections
from kproxy_ipvs.kernel.connections import Translation
from kproxy_ipvs.retire import count_untranslated, judge, short_circuits
from kproxy_ipvs.wanted import ServerKey

VIP = parse_address("10.96.0.1")
ONE, TWO = (Destination(parse_address(f"10.244.1.{number}"), 8080) for number in (1, 2))
WEB = ServerKey(Family.IPV4, 0, VIP, Protocol.TCP, 80)
TO_WEB = Frontend(VIP, Protocol.TCP, 80)
MARKED = ServerKey(Family.IPV4, 0x6B000001, None, 0, 0)

SERVERS = """\
IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A600001:0050 rr persistent 600 FFFFFFFF
  -> 0AF40101:1F90      Masq    1      2          3         
  -> 0AF40102:1F90      Local   0      0          0         
FWM  6B000001 rr
  -> 0AF40101:1F90      Masq    1      0          0         
UDP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0035 wlc 
  -> [fd00:0001:0000:0000:0000:0000:0000:0005]:0035      Masq    1      0          7         
SCTP 0A600001:0009 rr 
"""  # noqa: W291 - as the kernel writes it

CONNECTIONS = """\
Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
TCP C000020A 8F3C 0A600001 0050 0AF40101 1F90 ESTABLISHED     897
TCP C000020A 8F3E 0A600001 0050 0AF40101 1F90 CLOSE_WAIT       55
TCP C000020A 8F40 0A600001 0050 0AF40101 1F90 TIME_WAIT       116
TCP C000020A 8F42 0A600001 0050 0AF40102 1F90 TIME_WAIT       117
TCP C000020A 8F44 0A600001 0050 0AF40102 1F90 CLOSE           119
TCP C000020A 0000 0A600001 0050 0AF40101 1F90 NONE            110
UDP C000020A 8F40 0A600001 0035 0AF40101 0035 UDP             110
TCP fd00:0000:0000:0000:0000:0000:0000:0009 8F3C fd00:0000:0000:0000:0000:0000:0000:0001 0050 \
fd00:0001:0000:0000:0000:0000:0000:0005 1F90 FIN_WAIT     115
"""


def test_parse_real_servers() -> None:
    v6 = Destination(parse_address("fd00:1::5"), 53)
    assert connections.parse_real_servers(SERVERS.splitlines(keepends=True)) == {
        WEB: [RealServer(ONE, 1, 2, 3), RealServer(TWO, 0, 0, 0)],
        ServerKey(Family.IPV6, 0, parse_address("fd00::1"), Protocol.UDP, 53): [RealServer(v6, 1, 0, 7)],
        ServerKey(Family.IPV4, 0, VIP, Protocol.SCTP, 9): [],
    }


def test_parse_closing_connections() -> None:
    v6 = Translation(
        Frontend(parse_address("fd00::1"), Protocol.TCP, 80), Destination(parse_address("fd00:1::5"), 8080)
    )
    closing = connections.parse_closing(CONNECTIONS.splitlines(keepends=True))
    assert closing == {Translation(TO_WEB, ONE): 1, Translation(TO_WEB, TWO): 1, v6: 1}


def test_parse_connections_from_vips() -> None:
    v4 = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100600A:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100600A:A000 0100600A:0050 01 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   2: 0100600A:A002 0100600A:0050 06 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   3: 0100007F:A003 0100600A:0050 01 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
"""
    assert connections.parse_connected_from({VIP}, v4.splitlines()) == {VIP: 1}
    vip = parse_address("fd00::1")
    v6 = "0: 000000FD000000000000000001000000:A000 000000FD000000000000000001000000:0050 08 0:0 0:0 0 0 0"
    assert connections.parse_connected_from({vip}, [v6]) == {vip: 1}


JUDGED = [
    ("no connection", [RealServer(ONE, 1, 0, 0)], 0, [DeleteServer(WEB)], 0),
    ("only what has ended", [RealServer(ONE, 1, 0, 9)], 0, [DeleteServer(WEB)], 0),
    ("open", [RealServer(ONE, 1, 2, 9)], 0, [PutDestination(WEB, ONE, 0, new=False)], 2),
    ("open, seen before", [RealServer(ONE, 0, 2, 9)], 0, [], 2),
    ("called inactive, and in use", [RealServer(ONE, 0, 0, 9)], 3, [], 3),
    ("in use a moment ago", [RealServer(ONE, 0, 0, 1)], 3, [], 1),
    ("not IPVS's any more", [RealServer(ONE, 0, 0, 0)], 3, [DeleteServer(WEB)], 0),
    ("one of two", [RealServer(ONE, 0, 1, 0), RealServer(TWO, 1, 0, 4)], 0, [DeleteDestination(WEB, TWO)], 1),
]


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
@pytest.mark.parametrize(
    ("items", "in_use", "operations", "waiting"), [row[1:] for row in JUDGED], ids=[row[0] for row in JUDGED]
)
def test_servers_with_connections_are_kept(
    items: list[RealServer], in_use: int, operations: list[Operation], waiting: int, protocol: Protocol
) -> None:
    key = WEB._replace(protocol=protocol)
    frontend = TO_WEB._replace(protocol=protocol)
    judged = judge({key: items}, {}, {Translation(frontend, ONE): in_use})
    assert judged == ([operation._replace(key=key) for operation in operations], waiting)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_short_circuit_has_the_connections_of_its_frontends(protocol: str) -> None:
    entries = {names.SHORT_CIRCUIT: {f"10.96.0.1,{protocol}:80": MARKED.mark}}
    frontend = TO_WEB._replace(protocol=Protocol[protocol.upper()])
    in_use = {Translation(frontend, ONE): 3}
    _, waiting = judge({MARKED: [RealServer(ONE, 1, 0, 4)]}, short_circuits(entries), in_use)
    assert waiting == 3


def test_untranslated_flows_are_counted() -> None:
    client, dns = parse_address("192.0.2.10"), (VIP, 53)
    flows = [UdpFlow(client, dns, ONE, translated=False)] * 2 + [
        UdpFlow(client, dns, ONE, translated=True), UdpFlow(VIP, dns, TWO, translated=False),
    ]  # fmt: skip
    to_dns = Frontend(VIP, Protocol.UDP, 53)
    assert count_untranslated(flows) == {Translation(to_dns, ONE): 2, Translation(to_dns, TWO): 1}

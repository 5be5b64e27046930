"""Times of kproxy's own messages and of pyroute2, for virtual servers, ipset entries and addresses.

Run ``tests/guest/run .venv/bin/python -m tests.plugins.ipvs.bench_pyroute2 [SERVICES]``.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from kproxy_core.model.address import Address, Family, Protocol, format_address, parse_address
from kproxy_core.model.service import Destination
from kproxy_ipvs import names
from kproxy_ipvs.batch import DeleteServer, Operation, PutDestination, PutServer
from kproxy_ipvs.kernel import device, sets
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.wanted import Scheduling, ServerKey, SetEntry

ENDPOINTS = 5


def vips(count: int) -> list[Address]:
    return [parse_address(f"10.96.{number // 250}.{number % 250 + 1}") for number in range(count)]


def endpoints(number: int) -> list[Destination]:
    return [
        Destination(parse_address(f"10.{128 + number % 64}.{number // 64}.{pod + 1}"), 8080)
        for pod in range(ENDPOINTS)
    ]


def measure(what: str, action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    seconds = time.monotonic() - began
    print(f"  {what:44}{seconds:9.3f} s", flush=True)
    return seconds


def servers_own(addresses: Sequence[Address]) -> None:
    servers = VirtualServers()
    keys = [ServerKey(Family.IPV4, 0, address, Protocol.TCP, 80) for address in addresses]
    operations: list[Operation] = []
    for number, key in enumerate(keys):
        operations.append(PutServer(key, Scheduling("rr"), new=True))
        operations += [PutDestination(key, where, 1, new=True) for where in endpoints(number)]
    measure("own: virtual servers written", lambda: servers.write(operations))
    measure("own: virtual servers read", lambda: servers.read(Family.IPV4))
    measure("own: virtual servers deleted", lambda: servers.write([DeleteServer(key) for key in keys]))
    servers.close()


def servers_pyroute2(addresses: Sequence[Address]) -> None:
    from pyroute2 import IPVS, IPVSDest, IPVSService

    ipvs = IPVS()
    services = [
        IPVSService(addr=format_address(address), port=80, protocol=socket.IPPROTO_TCP, sched_name="rr")
        for address in addresses
    ]

    def write() -> None:
        for number, service in enumerate(services):
            ipvs.service("add", service=service)
            for where in endpoints(number):
                dest = IPVSDest(addr=format_address(where.address), port=where.port, weight=1, fwd_method=0)
                ipvs.dest("add", service=service, dest=dest)

    def read() -> None:
        for message in ipvs.service("dump"):
            list(ipvs.dest("dump", service=IPVSService.from_message(message)))

    def delete() -> None:
        for service in services:
            ipvs.service("del", service=service)

    measure("pyroute2: virtual servers written", write)
    measure("pyroute2: virtual servers read", read)
    measure("pyroute2: virtual servers deleted", delete)
    ipvs.close()


def entries_own(addresses: Sequence[Address]) -> None:
    kind = names.CLUSTER_IP
    sets.create(Family.IPV4, [kind])
    elements = [SetEntry(kind, f"{format_address(address)},tcp:80") for address in addresses]
    measure("own: entries added", lambda: sets.write(Family.IPV4, elements))
    measure("own: entries read", lambda: sets.read(Family.IPV4))
    measure("own: entries deleted", lambda: sets.write(Family.IPV4, (), elements))
    sets.destroy([kind.full_name(Family.IPV4)])


def entries_pyroute2(addresses: Sequence[Address]) -> None:
    from pyroute2 import IPSet
    from pyroute2.ipset import PortEntry

    ipset = IPSet()
    name, kind = "KUBE-CLUSTER-IP", ("ip", "port")
    ipset.create(name, stype="hash:ip,port")
    entries = [(format_address(address), ("tcp", 80)) for address in addresses]
    made = [(address, PortEntry(port, protocol=socket.IPPROTO_TCP)) for address, (_, port) in entries]
    measure("pyroute2: entries added", lambda: [ipset.add(name, each, etype=",".join(kind)) for each in made])
    measure("pyroute2: entries read", lambda: list(ipset.list(name)))
    measure("pyroute2: entries deleted", lambda: [ipset.delete(name, e, etype=",".join(kind)) for e in made])
    ipset.destroy(name)
    ipset.close()


def addresses_own(addresses: Sequence[Address]) -> None:
    measure("own: device created", device.ensure)
    measure("own: addresses added", lambda: device.bind(addresses, Family.IPV4))
    measure("own: addresses read", lambda: device.read(Family.IPV4))
    measure("own: addresses deleted", lambda: device.unbind(addresses, Family.IPV4))
    measure("own: device deleted", device.delete)


def addresses_pyroute2(addresses: Sequence[Address]) -> None:
    from pyroute2 import IPRoute

    ip = IPRoute()
    measure("pyroute2: device created", lambda: ip.link("add", ifname=names.DEVICE, kind="dummy"))
    index = ip.link_lookup(ifname=names.DEVICE)[0]
    texts = list(map(format_address, addresses))

    def add() -> None:
        for text in texts:
            ip.addr("add", index=index, address=text, prefixlen=32)

    def delete() -> None:
        for text in texts:
            ip.addr("del", index=index, address=text, prefixlen=32)

    measure("pyroute2: addresses added", add)
    measure("pyroute2: addresses read", lambda: list(ip.addr("dump", family=socket.AF_INET)))
    measure("pyroute2: addresses deleted", delete)
    measure("pyroute2: device deleted", lambda: ip.link("del", index=index))
    ip.close()


def main() -> None:
    subprocess.run(["modprobe", "-a", "ip_vs", "ip_vs_rr", "dummy"], check=True)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    print(f"{count} services x {ENDPOINTS}")

    def load() -> None:
        import pyroute2

        assert pyroute2

    measure("pyroute2: import", load)
    addresses = vips(count)
    for run in (
        servers_own, servers_pyroute2, entries_own, entries_pyroute2, addresses_own, addresses_pyroute2
    ):  # fmt: skip
        run(addresses)


if __name__ == "__main__":
    main()

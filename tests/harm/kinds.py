"""The table of harm: objects, neighbours, workers and kernels that are hostile to a running kproxy.

A row is a `Kind`. To try another one, add it: `test_harm` plays it in all its modes, `ipvs` in a guest,
`tests.bench.harm` measures it, and docs/reliability.md must name it.
"""

import json
import os
import random
import re
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kproxy_core.model.address import Family
from kproxy_ipvs.batch import DeleteServer
from kproxy_ipvs.kernel import device
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.names import DEVICE
from tests.core.processes import Proxy
from tests.harm.hostile import BEGUN
from tests.harm.room import HOSTILE, TARGET, Json, Room, addresses, children, repeated, service
from tests.shortage.test_netlink_buffers import shrink, watches

NFTABLES, IPTABLES, USERSPACE, EBPF = ON_HOST = ("nftables", "iptables", "userspace", "ebpf")
IPVS = "ipvs"
"""Only a guest's kernel has it."""
MODES = (*ON_HOST, IPVS)

_RULES = (NFTABLES, EBPF)
"""The modes with the tables of nftables."""

Begin = Callable[[Room, Proxy], AbstractContextManager[None]]
"""Does the harm for as long as the context lasts."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of harm, and what an operator sees of it."""

    name: str
    begin: Begin
    modes: Sequence[str] = MODES
    answers: tuple[str, int] | None = None
    """A frontend of the hostile objects that answers once they are served, as far as they are."""
    health: str = ""
    """Regular expression for the body of ``/healthz`` meanwhile."""
    log: str = ""
    """Regular expression for the log."""
    cuts_new: bool = False
    """New connections may fail until the repair: rules are missing or wrong meanwhile."""
    cuts_open: bool = False
    """Open connections may, too: without a rule that translates, their packets pass as they are."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Of the configuration."""
    own_tables: str = "auto"
    under: Sequence[str | Path] = ()
    """The command that starts kproxy."""

    def is_there(self, room: Room) -> bool:
        """Return whether the hostile objects are served, and the log has its line."""
        return ((self.answers is None or bool(room.answer(*self.answers)))
                and bool(re.search(self.log, room.here.logged)))

    def __str__(self) -> str:
        return self.name


# Objects.

_PORTS = range(1, 1001)
_PODS = ("10.99.1.1", "10.99.1.2")
_SERVED = (HOSTILE, 1)


def _objects(make: Callable[[], Sequence[Json]]) -> Begin:
    @contextmanager
    def begin(room: Room, _: Proxy) -> Iterator[None]:
        room.here.put("hostile", make())
        yield

    return begin


def _text(name: str, text: str) -> Begin:
    @contextmanager
    def begin(room: Room, _: Proxy) -> Iterator[None]:
        room.here.put_text(name, text)
        yield

    return begin


def _many_services(count: int, node_port: int = 0) -> list[Json]:
    """Return Services of 1,000 ports each, the first at `HOSTILE`. *node_port*: the first of all."""
    return [item for at in range(count) for item in service(
        f"many-{at}", f"10.96.200.{at + 1}", [TARGET], _PORTS,
        node_ports={port: node_port + 1000 * at + port - 1 for port in _PORTS} if node_port else {})]


def _long_names() -> list[Json]:
    """Return a Service whose name is too long, and objects with the longest names that Kubernetes admits."""
    refused = service("a" * 253, "10.96.200.2", [TARGET], [1])
    owner, piece = service("s" * 63, HOSTILE, [TARGET], [1])
    piece["metadata"]["name"] = "e" * 253
    return [*refused, owner, piece]


def _source_ranges(count: int, ports: Sequence[int] = (1,)) -> list[Json]:
    return service("hostile", HOSTILE, [TARGET], ports, type="LoadBalancer", ingress="203.0.113.50",
                   loadBalancerSourceRanges=[f"{each}/32" for each in addresses("172.16", count)])


def _forwards(count: int) -> str:
    return "\n---\n".join(json.dumps({
        "apiVersion": "kproxy.dev/v1", "kind": "Forward", "name": f"silent-{at}",
        "listen": [f"203.0.113.21:{1000 + at}"], "to": [f"{address}:80"], "check": {"tcp": "1s"},
    }) for at, address in enumerate(addresses("198.18", count)))  # fmt: skip


def _service_cidrs(count: int) -> list[Json]:
    return [{"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": f"range-{at}"},
             "spec": {"cidrs": [f"{each}/30"]}} for at, each in enumerate(addresses("100.64", count))]


@contextmanager
def _flaps(room: Room, _: Proxy) -> Iterator[None]:
    turns = iter(range(1 << 62))

    def flap() -> None:
        room.here.put("hostile", service("hostile", HOSTILE, [f"10.99.1.{next(turns) % 250 + 1}"], [1]))

    with repeated(flap, 0.001):
        yield


OBJECTS = (
    Kind("100,000 ports",
         _objects(lambda: _many_services(100)), answers=("10.96.200.100", 1000), modes=_RULES),
    Kind("1,000 ports at 15 external IPs, with a hash",
         _objects(lambda: service("hostile", HOSTILE, _PODS, _PORTS,
                                  annotations={"kproxy.dev/hash": "client"},
                                  externalIPs=addresses("198.51", 15))),
         answers=_SERVED, modes=(*_RULES, IPTABLES, IPVS)),
    Kind("1,000 ports with weights 65535 and 65534",
         _objects(lambda: service("hostile", HOSTILE, _PODS, _PORTS, weights=[65535, 65534])),
         answers=_SERVED),
    Kind("10,000 source ranges",
         _objects(lambda: _source_ranges(10_000)), answers=_SERVED),
    Kind("4,200 endpoints with affinity and policy Local",
         _objects(lambda: service("hostile", HOSTILE, addresses("10.99", 4200), [1], local=True,
                                  type="LoadBalancer", ingress="203.0.113.50", sessionAffinity="ClientIP",
                                  externalTrafficPolicy="Local")),
         answers=_SERVED),
    Kind("20,000 endpoints with affinity",
         _objects(lambda: service("hostile", HOSTILE, addresses("10.100", 20_000), [1],
                                  sessionAffinity="ClientIP")),
         answers=_SERVED, modes=(*_RULES, IPVS)),
    Kind("65,536 endpoints",
         _objects(lambda: service("hostile", HOSTILE, addresses("10.100", 65_536), [1])),
         answers=_SERVED, modes=(*_RULES, USERSPACE, IPVS)),
    Kind("1,000 source ranges at 1,000 ports",
         _objects(lambda: _source_ranges(1000, _PORTS)), answers=_SERVED),
    Kind("5,000 ServiceCIDRs",
         _objects(lambda: _service_cidrs(5000)), modes=(NFTABLES, IPTABLES)),
    Kind("names of 253 characters",
         _objects(_long_names),
         answers=_SERVED, log="a{63}.* is not a DNS label", modes=(NFTABLES, USERSPACE)),
    Kind("1,000 changes of a slice a second",
         _flaps, answers=_SERVED),
    Kind("900,000 lines of ---",
         _text("lines.yaml", "---\n" * 900_000),
         log="documents or items are no API objects", modes=(NFTABLES,)),
    Kind("1,000 Forwards to silent servers",
         _text("forwards.yaml", _forwards(1000)),
         log="check of an endpoint fails", modes=(NFTABLES, IPTABLES)),
    Kind("10,000 node ports on localhost",
         _objects(lambda: _many_services(10, 20_000)), answers=("127.0.0.1", 29_999),
         options={"nodePortAddresses": ["localhost", "primary"]}, modes=_RULES),
)  # fmt: skip


# Neighbours.

def _nft(text: str, *, again: float = 0.0) -> Begin:
    """Write *text*, and do it again every *again* seconds."""
    @contextmanager
    def begin(room: Room, _: Proxy) -> Iterator[None]:
        with ExitStack() as stack:
            if again:
                stack.enter_context(repeated(lambda: room.network.nft(text), again))
            else:
                room.network.nft(text)
            yield

    return begin


@contextmanager
def _odd_messages(room: Room, proxy: Proxy) -> Iterator[None]:
    """Send cut and random messages to all netlink sockets of kproxy."""
    chance = random.Random(0)

    def send() -> None:
        for line in Path(f"/proc/{proxy.pid}/net/netlink").read_text().splitlines()[1:]:
            protocol, port = map(int, line.split()[1:3])
            if port:
                room.network.inside(partial(_send_odd, protocol, port, chance))

    with repeated(send, 0.02):
        yield


def _send_odd(protocol: int, port: int, chance: random.Random) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as sock:
        for _ in range(10):
            body = chance.randbytes(chance.randrange(64))
            kind = chance.choice((2, 3, 16, 20, 0xA00, 0xA06, 0xA0C, chance.randrange(1 << 16)))
            length = chance.choice((0, 15, 16 + len(body), 1 << 31))
            header = struct.pack("=IHHII", length, kind, chance.randrange(32), chance.randrange(9), 0)
            with suppress(OSError):  # it was closed, or is full
                sock.sendto(header + body, socket.MSG_DONTWAIT, (port, 0))


@contextmanager
def _ipvs_cleared(room: Room, _: Proxy) -> Iterator[None]:
    def clear() -> None:
        room.network.nft("flush ruleset\n")
        with room.network.joined(), VirtualServers() as servers:
            servers.write([DeleteServer(key) for key in servers.read(Family.IPV4)])
            exists = device.exists()
        room.network.run("ipset", "flush")
        if exists:
            room.network.ip(f"link del {DEVICE}")

    with repeated(clear, 2.0):
        yield


_LOOKS_OFTEN = {"ipvs": {"syncPeriod": "1s"}}
"""In mode ipvs, only full syncs find changes of rules."""
_REPAIRED = "repaired foreign changes|full sync found differences"

NEIGHBOURS = (
    Kind("catch-all elements", _nft(
        "add element ip kproxy vips { * : drop }\nadd element ip kproxy cluster-ips { * }\n"),
        modes=_RULES, own_tables="never", cuts_new=True, log="repaired foreign changes"),
    Kind("an anonymous chain in a base chain", _nft(
        "add chain ip kproxy x { type filter hook forward priority 0; }\n"
        "add rule ip kproxy x meta mark 7 jump { drop; }\n"),
        modes=_RULES, own_tables="never", cuts_new=True, log="repaired foreign changes"),
    Kind("a map of another type with a name of ours", _nft(
        "flush chain ip kproxy services\ndelete map ip kproxy vips\n"
        "add map ip kproxy vips { type mark : verdict; }\nadd element ip kproxy vips { 7 : drop }\n"),
        modes=_RULES, own_tables="never", cuts_new=True, log="repaired foreign changes"),
    Kind("a rule that iptables cannot read", _nft(
        "add rule ip nat KUBE-SERVICES ip saddr . tcp dport { 192.0.2.77 . 7 } drop\n"),
        modes=(IPTABLES, IPVS), options=_LOOKS_OFTEN, log=_REPAIRED),
    Kind("nft flush ruleset every 0.2 s", _nft("flush ruleset\n", again=0.2),
         own_tables="never", options=_LOOKS_OFTEN, cuts_new=True, cuts_open=True, log=_REPAIRED),
    Kind("rules, virtual servers, ipset entries and kube-ipvs0 deleted every 2 s", _ipvs_cleared,
         modes=(IPVS,), cuts_new=True, cuts_open=True, log="repaired foreign changes"),
    Kind("odd netlink messages", _odd_messages),
)  # fmt: skip


# Workers.

def _signalled(number: int) -> Begin:
    @contextmanager
    def begin(room: Room, proxy: Proxy) -> Iterator[None]:
        room.here.put("hostile", service("hostile", HOSTILE, [TARGET], [1], node_ports={1: 30_080}))
        room.await_answer("127.0.0.1", 30_080)
        workers = [pid for pid in children(proxy) if b"relay" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert workers
        for pid in workers:
            os.kill(pid, number)
        # The worker must get an order meanwhile.
        room.here.put("hostile", service("hostile", HOSTILE, [TARGET], [1], node_ports={1: 30_081}))
        try:
            yield
        finally:
            for pid in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        room.await_answer("127.0.0.1", 30_081)

    return begin


_RELAYS = {"nodePortAddresses": ["localhost", "primary"]}
WORKERS = (
    Kind("SIGSTOP of the relay worker", _signalled(signal.SIGSTOP), modes=(NFTABLES,), options=_RELAYS,
         health="relay"),
    Kind("SIGKILL of the relay worker", _signalled(signal.SIGKILL), modes=(NFTABLES,), options=_RELAYS),
)  # fmt: skip


# The kernel.

@contextmanager
def _no_buffers(room: Room, proxy: Proxy) -> Iterator[None]:
    """Let every watch lose notifications all the time."""
    for inode in watches(proxy.pid):
        shrink(proxy.pid, inode)
    noise = "add table ip noise; " + "".join(f"add chain ip noise c{at}; " for at in range(300))
    of_rules = f"{noise} delete table ip noise\n"
    of_addresses = [
        f"address {what} 198.51.99.{at}/32 dev lan0" for what in ("add", "del") for at in range(50)
    ]

    def make_noise() -> None:
        room.network.nft(of_rules)
        room.network.ip(*of_addresses)

    with repeated(make_noise, 0.1):
        yield


@contextmanager
def _interrupted(_: Room, proxy: Proxy) -> Iterator[None]:
    """Stop and continue the process: waiting system calls are interrupted."""
    def interrupt() -> None:
        os.kill(proxy.pid, signal.SIGSTOP)
        os.kill(proxy.pid, signal.SIGCONT)

    with repeated(interrupt, 0.02):
        yield


@contextmanager
def _begun(room: Room, _: Proxy) -> Iterator[None]:
    (room.here.directory / BEGUN).touch()
    yield


@contextmanager
def _nothing(_: Room, __: Proxy) -> Iterator[None]:
    yield


def hostile(harm: str, argument: str) -> Sequence[str | Path]:
    """Return the command that starts kproxy where *harm* is done, see `hostile.py`."""
    return (sys.executable, Path(__file__).with_name("hostile.py"), harm, argument)


KERNEL = (
    Kind("notifications are lost (ENOBUFS)", _no_buffers, log="notifications were lost"),
    Kind("one in 50 netlink calls fails with ENOBUFS", _begun, under=hostile("netlink", "ENOBUFS"),
         log="No buffer space available", modes=(*_RULES, IPTABLES)),
    Kind("one in 50 netlink calls fails with EINTR", _begun, under=hostile("netlink", "EINTR"),
         log="Interrupted system call|rules changed during every attempt", modes=(*_RULES, IPTABLES, IPVS)),
    Kind("stopped and continued 50 times a second (EINTR)", _interrupted),
    Kind("the wall clock jumps by a million seconds", _nothing, under=hostile("clock", "1000000"),
         modes=(*_RULES, USERSPACE, IPVS)),
    Kind("monotonic clocks ahead by a million seconds", _nothing,
         under=("unshare", "--time", "--monotonic", "1000000", "--boottime", "1000000"), modes=_RULES),
    Kind("seccomp refuses pidfd_open", _nothing, under=hostile("refused", "pidfd_open"), modes=(NFTABLES,)),
    Kind("seccomp refuses setpriority", _nothing, under=hostile("refused", "setpriority"), modes=(NFTABLES,)),
    Kind("seccomp refuses prlimit64", _nothing, under=hostile("refused", "prlimit64"),
         modes=(NFTABLES, USERSPACE), log="could not raise the limit of open files"),
)  # fmt: skip

NOTHING = Kind("nothing", _nothing)
KINDS = (*OBJECTS, *NEIGHBOURS, *WORKERS, *KERNEL)

"""The state of this node that decides whether Services work on it, read and never changed.

Everything is that of the calling thread's network namespace, except the clock, the cgroups and the kernel.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from kproxy_core.linux import sysctl
from kproxy_core.linux.addresses import default_interface, interface_towards, read_interface_addresses
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.libnftables import list_tables
from kproxy_core.linux.links import Link, read_links
from kproxy_core.linux.modules import Modules, Presence
from kproxy_core.linux.rulesets import all_tables, chain_exists
from kproxy_core.model.address import Address, Cidr, Family
from kproxy_core.nft.listing import TableName

T = TypeVar("T")

SERVICE_PROXIES: Final = frozenset({"kube-proxy", "cilium-agent", "kube-router"})
"""Programs that may serve Services, by the name of the process."""

_SETTINGS: Final = (
    "net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/ipv4/conf/all/rp_filter",
    "net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables",
    "net/netfilter/nf_conntrack_count", "net/netfilter/nf_conntrack_max",
    "net/ipv4/ip_local_port_range", "net/ipv4/ip_local_reserved_ports",
)  # fmt: skip
_CILIUM_SOCKETS: Final = Path("/sys/fs/bpf/tc/globals/cilium_lb4_reverse_sk")
"""The map that Cilium makes if it translates in sockets, as it does in place of kube-proxy."""
_MOST_ROUTES: Final = 200
_STA_UNSYNC: Final = 0x40


class Process(NamedTuple):
    pid: int
    name: str


class LinkAddress(NamedTuple):
    link: int
    address: Address
    network: Cidr


class NodeState(NamedTuple):
    kernel: str
    settings: Mapping[str, str]
    """By name, such as ``net/ipv4/ip_forward``; those that the kernel lacks are missing."""
    links: Sequence[Link] = ()
    addresses: Sequence[LinkAddress] = ()
    uplinks: Mapping[Family, str] = {}
    """The interface of the default route; "" without one."""
    routes: Mapping[Address, str] = {}
    """The interfaces towards the addresses that were asked for."""
    tables: Sequence[TableName] = ()
    service_chains: Sequence[str] = ()
    """The tables of iptables with the chain KUBE-SERVICES."""
    legacy_tables: Sequence[str] = ()
    """The tables of iptables-legacy."""
    unread_tables: Sequence[str] = ()
    """Those that libnftables cannot list, each with the reason."""
    proxies: Sequence[Process] = ()
    """Processes of this network namespace that are called like a service proxy."""
    has_socket_translation: bool = False
    """Cilium translates addresses of Services in sockets."""
    is_clock_synchronized: bool = True
    cgroup_v1: str = ""
    """The place where cgroups of version 1 are mounted; "": nowhere, or beside a unified hierarchy."""
    problems: Sequence[str] = ()
    """What could not be read, and why."""


def read_node_state(towards: Collection[Address] = ()) -> NodeState:
    """Return the state of this node, with the interfaces *towards* some addresses, the first 200 at most."""
    problems: list[str] = []

    def attempt(read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except HostError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename or 'the node'}: {error.strerror}")
        return otherwise

    links: Sequence[Link] = attempt(read_links, list[Link]())
    tables: Sequence[TableName] = ()
    if Modules().presence("nf_tables") in (Presence.LOADED, Presence.BUILT_IN):  # Reading would load it.
        tables = attempt(all_tables, [])
    return NodeState(
        kernel=platform.release(),
        settings=attempt(lambda: _settings(links), {}),
        links=links,
        addresses=attempt(_addresses, []),
        uplinks=attempt(lambda: {family: default_interface(family) for family in Family}, {}),
        routes=attempt(lambda: {to: interface_towards(to) for to in [*towards][:_MOST_ROUTES]}, {}),
        tables=tables,
        service_chains=attempt(lambda: _service_chains(tables), []),
        legacy_tables=legacy_tables(),
        unread_tables=attempt(lambda: list_tables(style=["terse_output"]).unread if tables else (), ()),
        proxies=_proxies(),
        has_socket_translation=_CILIUM_SOCKETS.exists(),
        is_clock_synchronized=_is_clock_synchronized(),
        cgroup_v1=attempt(_cgroup_v1, ""),
        problems=problems,
    )


def _settings(links: Sequence[Link]) -> dict[str, str]:
    found = {}
    own = [f"net/ipv4/conf/{link.name}/rp_filter" for link in links]
    for name in (*_SETTINGS, *own):
        with suppress(FileNotFoundError):
            found[name] = _setting(name)
    return found


def _setting(name: str) -> str:
    try:
        return sysctl.read(name)
    except HostError as error:
        if not Path("/proc/sys", name).exists():
            raise FileNotFoundError(name) from error
        raise


def _addresses() -> list[LinkAddress]:
    found = []
    for each in read_interface_addresses():
        address, size = each.address, len(each.address)
        mask = ((1 << each.prefix_length) - 1) << (size * 8 - each.prefix_length)
        network = (int.from_bytes(address, "big") & mask).to_bytes(size, "big")
        found.append(LinkAddress(each.interface, address, Cidr(Address(network), each.prefix_length)))
    return found


def _service_chains(tables: Collection[TableName]) -> list[str]:
    return [
        f"{family.ip} nat" for family in Family
        if TableName(family.ip, "nat") in tables and chain_exists(family, "nat", "KUBE-SERVICES")
    ]  # fmt: skip


def legacy_tables() -> list[str]:
    """Return the tables of iptables-legacy, as ``ip filter``."""
    found = []
    for family in ("ip", "ip6"):
        with suppress(OSError):
            names = Path(f"/proc/thread-self/net/{family}_tables_names").read_text(encoding="ascii").split()
            found += [f"{family} {name}" for name in names]
    return found


def _proxies() -> list[Process]:
    """Return the service proxies among the processes that are visible here."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It has ended, or belongs to another user.
            name = (path / "comm").read_text(errors="replace").strip()
            if name in SERVICE_PROXIES and os.path.samefile(path / "ns/net", "/proc/thread-self/ns/net"):
                found.append(Process(int(path.name), name))
    return sorted(found)


class _Timex(ctypes.Structure):
    """The first fields of struct timex (linux/timex.h), and room for the others."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long), ("esterror", ctypes.c_long), ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )  # fmt: skip


def _is_clock_synchronized() -> bool:
    """Return what the kernel knows of it: the service that adjusts the clock tells it (adjtimex(2))."""
    read = _Timex()
    return ctypes.CDLL(None).adjtimex(ctypes.byref(read)) < 0 or not read.status & _STA_UNSYNC


def _cgroup_v1() -> str:
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return ""
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup":
            return where
    return ""

"""Network namespaces without names: the kernel deletes them with the process, however it ends.

A socket belongs to the namespace and the cgroup that it was created in for life, so one process can talk from
every host of a topology: a thread enters a namespace, creates the socket and leaves again.
"""

import contextlib
import ctypes
import errno
import functools
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.network.rights import MissingRight

if TYPE_CHECKING:
    from pyroute2 import IPRoute

_CLONE_NEWNET = 0x40000000
_IFA_F_NODAD = 0x02
_FOREVER = 0xFFFFFFFF
_SCOPE_LINK, _SCOPE_HOST, _TABLE_LOCAL = 253, 254, 255
_LIBC = ctypes.CDLL(None, use_errno=True)

COMMAND_TIMEOUT = 60.0
"""Seconds."""

_SETTINGS = {
    "net/ipv6/conf/{}/disable_ipv6": 0,
    "net/ipv6/conf/{}/accept_dad": 0,  # addresses are usable at once
    "net/ipv6/conf/{}/accept_ra": 0,
    "net/ipv6/conf/{}/accept_redirects": 0,
    "net/ipv4/conf/{}/rp_filter": 0,  # a reply may take another path than the request
    "net/ipv4/conf/{}/accept_redirects": 0,
    "net/ipv4/conf/{}/send_redirects": 0,
}
_RATES = {
    "net/ipv4/icmp_ratelimit": 0,
    "net/ipv6/icmp/ratelimit": 0,
    # No ICMP errors under the limit of 1000 a second that all namespaces share: a refusal that is sent while
    # other tests cause many would be dropped.
    "net/ipv4/icmp_ratemask": 0,
    "net/ipv6/icmp/ratemask": 2,
}


class CommandFailed(Exception):
    """A command of the tests, not of the proxy, failed. The message has its output."""


def run(*argv: str, stdin: str = "", timeout: float = COMMAND_TIMEOUT) -> str:
    """Run *argv* in the calling thread's namespace, and return its output. Raises CommandFailed."""
    try:
        done = _run(argv, stdin, timeout)
    except OSError as error:
        raise CommandFailed(f"{argv[0]}: {error.strerror}") from error
    if done.returncode:
        raise CommandFailed(f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout}")
    return done.stdout


def _run(argv: Sequence[str], stdin: str, timeout: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        argv, input=stdin, text=True, errors="replace", timeout=timeout, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


class Namespace:
    """A network namespace with its loopback up, deleted when it is closed and nothing runs in it."""

    def __init__(self, name: str, cgroup: NodeCgroup | None = None) -> None:
        """*cgroup*: sockets of this namespace are created there. Raises MissingRight, OSError."""
        self.name = name
        self._cgroup = cgroup
        with _current() as home:
            try:
                _check(_LIBC.unshare(_CLONE_NEWNET))
            except PermissionError as error:
                raise MissingRight("network namespaces", os.strerror(errno.EPERM)) from error
            try:
                self._handle = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                for setting, value in _SETTINGS.items():
                    for scope in ("all", "default"):
                        _write(setting.format(scope), value)
                for setting, value in _RATES.items():
                    _write(setting, value)
            finally:
                _check(_LIBC.setns(home, _CLONE_NEWNET))
        self._netlink.link("set", index=1, state="up")

    @property
    def path(self) -> str:
        """The namespace as a path, for ``ip link ... netns`` and ``nsenter --net=``."""
        return f"/proc/{os.getpid()}/fd/{self._handle}"

    def close(self) -> None:
        self._netlink.close()
        os.close(self._handle)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move the calling thread, and processes that it starts, into the namespace and its cgroup."""
        with contextlib.ExitStack() as stack:
            if self._cgroup is not None:
                stack.enter_context(self._cgroup.entered())
            stack.enter_context(self.joined())
            yield

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Move the calling thread into the namespace alone."""
        with _current() as home:
            _check(_LIBC.setns(self._handle, _CLONE_NEWNET))
            try:
                yield
            finally:
                _check(_LIBC.setns(home, _CLONE_NEWNET))

    def socket(self, family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        with self.entered():
            return socket.socket(family, kind)

    def add_veth(
        self, device: str, peer: "Namespace", peer_device: str, *, mac: str = "", mtu: int = 1500
    ) -> None:
        """Connect *device* of this namespace to *peer_device* of *peer*, and set both up.

        *mac*: the hardware address of *device*; "": one that the kernel chooses.
        """
        end = {"ifname": peer_device, "net_ns_fd": peer._handle, "mtu": mtu}
        options = {"address": mac} if mac else {}
        self._netlink.link("add", ifname=device, kind="veth", peer=end, mtu=mtu, **options)
        for namespace, name in ((self, device), (peer, peer_device)):
            namespace._netlink.link("set", index=namespace._index(name), state="up")

    def add_bridge(self, device: str, *ports: str) -> None:
        self._netlink.link("add", ifname=device, kind="bridge")
        index = self._index(device)
        for port in ports:
            self._netlink.link("set", index=self._index(port), master=index)
        self._netlink.link("set", index=index, state="up")

    def add_port(self, bridge: str, device: str) -> None:
        self._netlink.link("set", index=self._index(device), master=self._index(bridge))

    def reflect(self, port: str) -> None:
        """Have a bridge send packets back to the *port* that they came from (hairpin mode)."""
        self._netlink.brport("set", index=self._index(port), mode=1)

    def add_address(self, address: str, device: str, *, preferred: bool = True) -> None:
        """Add ``IP/PREFIX``. *preferred*: IPv6 may choose it as the source of new connections."""
        host, _, prefix = address.partition("/")
        options: dict[str, object] = {}
        if ":" in host:
            options["flags"] = _IFA_F_NODAD
            if not preferred:
                options |= {"preferred": 0, "valid": _FOREVER}
        self._netlink.addr("add", index=self._index(device), address=host, prefixlen=int(prefix), **options)

    def add_route(
        self, to: str, *, via: str = "", device: str = "", source: str = "", kind: str = "unicast",
        onlink: bool = False,
    ) -> None:  # fmt: skip
        """Add a route to the network *to*; *source* is the source address of local packets."""
        options: dict[str, object] = {"gateway": via} if via else {"scope": _SCOPE_LINK}
        options |= {"oif": self._index(device)} if device else {}
        options |= {"prefsrc": source} if source else {}
        options |= {"flags": "onlink"} if onlink else {}
        if kind == "local":
            options |= {"table": _TABLE_LOCAL, "scope": _SCOPE_HOST}
        self._netlink.route("add", dst=to, family=_family(to), type=kind, **options)

    @functools.cached_property
    def _netlink(self) -> "IPRoute":
        """A socket for requests about links, addresses and routes, which belongs to the namespace."""
        from pyroute2 import IPRoute

        with self.joined():
            return IPRoute()

    def _index(self, device: str) -> int:
        with self.joined():
            return socket.if_nametoindex(device)

    def forget_connections(self) -> None:
        """Delete all entries of connection tracking."""
        from pyroute2 import NFCTSocket

        with self.joined(), NFCTSocket() as tracking:
            tracking.flush()

    def configure(self, setting: str, value: int | str) -> None:
        """Set *setting*, such as ``net/ipv4/ip_forward``. Raises OSError."""
        with self.joined():
            _write(setting, value)

    def forward(self) -> None:
        """Make it a router."""
        self.configure("net/ipv4/ip_forward", 1)
        self.configure("net/ipv6/conf/all/forwarding", 1)

    def run(self, *argv: str, stdin: str = "", timeout: float = COMMAND_TIMEOUT) -> str:
        """Return the output of *argv* in the namespace. Raises CommandFailed."""
        with self.entered():
            return run(*argv, stdin=stdin, timeout=timeout)

    def attempt(self, *argv: str, timeout: float = COMMAND_TIMEOUT) -> "subprocess.CompletedProcess[str]":
        """Run *argv* in the namespace, and return its exit status and output whatever they are."""
        with self.entered():
            return _run(argv, "", timeout)

    def start(self, argv: Sequence[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start a program in the namespace, in a session of its own, with its output in *log*."""
        with self.entered():
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


@contextlib.contextmanager
def _current() -> Iterator[int]:
    handle = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _write(setting: str, value: int | str) -> None:
    with open(f"/proc/sys/{setting}", "w", encoding="ascii") as file:
        file.write(str(value))


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

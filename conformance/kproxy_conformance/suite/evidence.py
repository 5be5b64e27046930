"""Evidence of a failed scenario: rules, connections, counters, and the last packets at the node."""

import collections
import contextlib
import os
import select
import socket
import struct
import threading
import time
from pathlib import Path

from kproxy_conformance.network.namespaces import Namespace

_RULES = (("nft", "list", "ruleset"), ("iptables-save",), ("ip6tables-save",), ("ipset", "list"))
_STATE = (
    ("conntrack", "-L"), ("conntrack", "-L", "-f", "ipv6"), ("conntrack", "-S"), ("ss", "-H", "-tuanp"),
    ("nstat", "-asz"), ("ip", "-s", "link"), ("ip", "address"), ("ip", "route", "show", "table", "all"),
    ("ip", "-6", "route", "show", "table", "all"), ("ip", "neighbour"), ("cat", "/proc/loadavg"),
    ("cat", "/proc/net/ip_vs", "/proc/net/ip_vs_conn"),
)  # fmt: skip
_ETH_P_ALL = 3
_PCAP_HEADER = struct.pack("=IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 65535, 276)
"""Nanoseconds; 276 is LINKTYPE_LINUX_SLL2."""
_SNAPPED = 160
"""Bytes of each packet that are kept."""
_PACKETS = 4000
_PAUSE = 0.1
"""Seconds between two readings: a thread that wakes for every packet would slow the clients down."""
_UNREAD = 8 << 20
"""Bytes of packets that the kernel keeps until then."""
_SO_RCVBUFFORCE = 33
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@ll")


def ruleset(node: Namespace) -> str:
    """Return everything that the packet filter of *node* holds, as text."""
    return _outputs(node, _RULES)


def state(node: Namespace) -> str:
    """Return rules, connections, counters and routes of *node*, as text."""
    return _outputs(node, (*_RULES, *_STATE))


def _outputs(node: Namespace, commands: tuple[tuple[str, ...], ...]) -> str:
    parts = []
    for argv in commands:
        try:
            done = node.attempt(*argv)
            output = done.stdout + (f"exit status {done.returncode}\n" if done.returncode else "")
        except OSError as error:
            output = f"{error.strerror}\n"
        parts.append(f"# {' '.join(argv)}\n{output}\n")
    return "".join(parts)


class Capture:
    """The last packets at every interface of a node, in memory until they are asked for.

    They are kept for every scenario, because a failure that happens once in a thousand runs cannot be asked
    to happen again.
    """

    def __init__(self, node: Namespace) -> None:
        self._packets: collections.deque[bytes] = collections.deque(maxlen=_PACKETS)
        with node.entered():
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_ALL))
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _UNREAD)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._lock = threading.Lock()
        self._wake_r, self._wake_w = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True, name="capture")
        self._thread.start()

    def clear(self) -> None:
        self._read()
        self._packets.clear()

    def write(self, path: Path) -> None:
        """Write the captured packets to *path*, for tcpdump or Wireshark."""
        self._read()
        path.write_bytes(_PCAP_HEADER + b"".join(list(self._packets)))

    def close(self) -> None:
        os.write(self._wake_w, b"x")
        self._thread.join()
        self._socket.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _run(self) -> None:
        wake = select.poll()
        wake.register(self._wake_r, select.POLLIN)
        while not wake.poll(_PAUSE * 1000):
            self._read()

    def _read(self) -> None:
        """Read what has arrived so far. More may arrive all the time, faster than it can be read."""
        began, arrived = time.time_ns(), 0
        with self._lock, contextlib.suppress(OSError):
            while arrived <= began:
                data, ancillary, _, source = self._socket.recvmsg(_SNAPPED, 64)
                _, protocol, kind, hardware, address = source
                seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
                arrived = seconds * 1_000_000_000 + nanoseconds
                head = struct.pack("!HHIHBB8s", protocol, 0, 0, hardware, kind, len(address), address)
                size = len(head) + len(data)
                self._packets.append(struct.pack("=IIII", seconds, nanoseconds, size, size) + head + data)

"""Evidence of a failed scenario: rules, connections, counters, and the last packets at the node."""

import collections
import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from pathlib import Path

from kproxy_core.testing.network.namespaces import Namespace

_RULES = (("nft", "list", "ruleset"), ("iptables-save",), ("ip6tables-save",), ("ipset", "list"))
_STATE = (
    ("conntrack", "-L"), ("conntrack", "-L", "-f", "ipv6"), ("conntrack", "-S"), ("ss", "-H", "-tuanp"),
    ("nstat", "-asz"), ("ip", "-s", "link"), ("ip", "address"), ("ip", "route", "show", "table", "all"),
    ("ip", "-6", "route", "show", "table", "all"), ("ip", "neighbour"), ("cat", "/proc/loadavg"),
)  # fmt: skip
_ETH_P_ALL = 3
_PCAP_HEADER = struct.pack("=IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 65535, 276)
"""Nanoseconds; 276 is LINKTYPE_LINUX_SLL2."""
_SNAPPED = 160
"""Bytes of each packet that are kept."""
_PACKETS = 4000


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
            output = node.attempt(*argv).stdout
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
        self._wake_r, self._wake_w = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True, name="capture")
        self._thread.start()

    def clear(self) -> None:
        self._packets.clear()

    def write(self, path: Path) -> None:
        """Write what was captured to *path*, for tcpdump or Wireshark."""
        path.write_bytes(_PCAP_HEADER + b"".join(list(self._packets)))

    def close(self) -> None:
        os.write(self._wake_w, b"x")
        self._thread.join()
        self._socket.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wake_r, selectors.EVENT_READ)
            while not any(key.fd == self._wake_r for key, _ in selector.select()):
                with contextlib.suppress(OSError):
                    self._read()

    def _read(self) -> None:
        """Raises BlockingIOError once nothing is left."""
        while True:
            data, (_, protocol, kind, hardware, address) = self._socket.recvfrom(_SNAPPED)
            now = time.time_ns()
            head = struct.pack("!HHIHBB8s", protocol, 0, 0, hardware, kind, len(address), address)
            size = len(head) + len(data)
            record = struct.pack("=IIII", now // 10**9, now % 10**9, size, size)
            self._packets.append(record + head + data)

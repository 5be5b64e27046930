"""The kernel's nftables state over netlink, without the nft program and without a dump."""
import errno
import re
import socket
import struct
import time

NETLINK_NETFILTER = 12
NFNL_SUBSYS_NFTABLES = 10
NFNLGRP_NFTABLES = 7
SOL_NETLINK = 270
NETLINK_ADD_MEMBERSHIP = 1
SO_RCVBUFFORCE = 33
NEWGEN = NFNL_SUBSYS_NFTABLES << 8 | 15
GETGEN = NFNL_SUBSYS_NFTABLES << 8 | 16


class Generation:
    """The generation of the rule set in this namespace."""

    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self.sock.settimeout(30)
        self.request = struct.pack("=IHHIIBBH", 20, GETGEN, 1, 1, 0, 0, 0, 0)

    def get(self) -> int:
        """Return the generation, which every commit raises."""
        self.sock.send(self.request)
        data = self.sock.recv(4096)
        at = 20                                   # nlmsghdr + nfgenmsg
        while at + 4 <= len(data):
            size, kind = struct.unpack_from("=HH", data, at)
            if kind & 0x3fff == 1:                # NFTA_GEN_ID
                generation: int = struct.unpack_from(">I", data, at + 4)[0]
                return generation
            at += max(4, (size + 3) & ~3)
        return 0


class Monitor:
    """Collects the time at which each awaited address is first part of a commit.

    wait_for(ip) registers an address; poll(timeout) reads what has come in.
    `seen` maps address -> CLOCK_MONOTONIC time; `commits` counts the commits,
    `lost` the times the kernel had more to say than the buffer holds.
    The addresses must be in 10.192.0.0/10 (the range of `objects` for changes).
    """
    PATTERN = re.compile(rb"\x0a[\xc0-\xff][\x00-\xff]{2}", re.S)

    def __init__(self, buffer: int = 256 << 20) -> None:
        self.sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self.sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, buffer)
        self.sock.bind((0, 0))
        self.sock.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, NFNLGRP_NFTABLES)
        self.sock.setblocking(False)
        self.buf = bytearray(1 << 20)
        self.awaited: set[bytes] = set()
        self.seen: dict[str, float] = {}
        self.commits = self.lost = self.bytes = 0
        self.commit_times: list[float] = []

    def fileno(self) -> int:
        return self.sock.fileno()

    def wait_for(self, address: str) -> None:
        self.awaited.add(socket.inet_aton(address))

    def poll(self) -> None:
        """Read everything that has arrived."""
        while True:
            try:
                n = self.sock.recv_into(self.buf)
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno != errno.ENOBUFS:
                    raise
                self.lost += 1
                continue
            now = time.monotonic()
            self.bytes += n
            if n >= 6 and struct.unpack_from("=H", self.buf, 4)[0] == NEWGEN:
                self.commits += 1
                self.commit_times.append(now)
                continue
            if self.awaited:
                # overlapping matches matter: restart one byte after each hit
                at, view = 0, self.buf
                while True:
                    m = self.PATTERN.search(view, at, n)
                    if not m:
                        break
                    key = m.group()
                    if key in self.awaited:
                        self.awaited.discard(key)
                        self.seen[socket.inet_ntoa(key)] = now
                        at = m.end()
                    else:
                        at = m.start() + 1

    def has_seen(self, address: str) -> bool:
        return address in self.seen

    def close(self) -> None:
        self.sock.close()

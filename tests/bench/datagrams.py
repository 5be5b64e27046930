"""The savings of recvmmsg and sendmmsg, through ctypes, over one system call per datagram.

    python -m tests.bench.datagrams

CPU time for one datagram in microseconds, as a UDP relay takes it: with its sender, the address that it was
sent to, and its bytes as a value. The best of five runs.
"""

import ctypes
import socket
import struct
import time
from collections.abc import Callable

AT_ONCE = 64
WAITING = 3000
RUNS = 5

_LONGEST, _NAME, _CONTROL = 65536, 32, 64
_IP_PKTINFO, _SO_RCVBUFFORCE = 8, 33
_PKTINFO = struct.Struct("=I4s4s")


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p), ("name_size", ctypes.c_uint32), ("vector", ctypes.c_void_p),
        ("vectors", ctypes.c_size_t), ("control", ctypes.c_void_p), ("control_size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )  # fmt: skip


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("size", ctypes.c_uint))


class Batch:
    """Memory for the datagrams of one call."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        buffers = [ctypes.create_string_buffer(AT_ONCE * size) for size in (_NAME, _CONTROL, _LONGEST)]
        self.names, self.controls, self.data = (memoryview(buffer).cast("B") for buffer in buffers)
        name, control, data = map(ctypes.addressof, buffers)
        self._keep = buffers
        self._vectors = (_Iovec * AT_ONCE)()
        self.messages = (_Message * AT_ONCE)()
        for n in range(AT_ONCE):
            self._vectors[n] = _Iovec(data + n * _LONGEST, _LONGEST)
            at = ctypes.addressof(self._vectors) + n * ctypes.sizeof(_Iovec)
            self.messages[n].header = _Header(
                name + n * _NAME, _NAME, at, 1, control + n * _CONTROL, _CONTROL, 0)
        self._fresh = bytes(self.messages)
        self._view = memoryview(self.messages).cast("B")

    def receive(self, sock: socket.socket) -> int:
        """Return the number of datagrams received."""
        self._view[:] = self._fresh  # the kernel wrote the sizes of earlier datagrams
        return int(self._libc.recvmmsg(sock.fileno(), self.messages, AT_ONCE, socket.MSG_DONTWAIT, None))

    def send(self, sock: socket.socket, data: bytes) -> int:
        """Send *data* as often as one call can. Return how often."""
        for n in range(AT_ONCE):
            self.data[n * _LONGEST : n * _LONGEST + len(data)] = data
            self._vectors[n].size = len(data)
            header = self.messages[n].header
            header.name, header.name_size, header.control, header.control_size = None, 0, None, 0
        return int(self._libc.sendmmsg(sock.fileno(), self.messages, AT_ONCE, 0))


def one_by_one(sock: socket.socket) -> int:
    count = 0
    found: dict[object, bytes] = {}
    while True:
        try:
            data, control, _, sender = sock.recvmsg(_LONGEST - 1, _CONTROL)
        except BlockingIOError:
            return count
        found[sender, _PKTINFO.unpack_from(control[0][2])[1]] = data
        count += 1


def many_at_once(sock: socket.socket, batch: Batch) -> int:
    count = 0
    found: dict[object, bytes] = {}
    while (received := batch.receive(sock)) > 0:
        for n in range(received):
            # The head of the control message is 16 bytes, the index of the interface 4.
            local = bytes(batch.controls[n * _CONTROL + 20 : n * _CONTROL + 24])
            data = bytes(batch.data[n * _LONGEST : n * _LONGEST + batch.messages[n].size])
            found[bytes(batch.names[n * _NAME : n * _NAME + 8]), local] = data
        count += received
    return count


def cpu_of(what: Callable[[], int], before: Callable[[], None] = lambda: None) -> float:
    """Return the CPU microseconds for each unit that *what* returns."""
    found = []
    for _ in range(RUNS):
        before()
        began = time.process_time()
        count = what()
        found.append((time.process_time() - began) / count * 1e6)
    return min(found)


def main() -> None:
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 8 << 20)
    receiver.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    receiver.bind(("127.0.0.1", 0))
    receiver.setblocking(False)
    senders = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(50)]
    for sender in senders:
        sender.connect(receiver.getsockname())
    batch = Batch()
    for size in (64, 1200):
        data = bytes(size)

        def fill(data: bytes = data) -> None:
            for n in range(WAITING):
                senders[n % len(senders)].send(data)

        print(f"{size} bytes: recvmsg {cpu_of(lambda: one_by_one(receiver), fill):.2f}, "
              f"recvmmsg {cpu_of(lambda: many_at_once(receiver, batch), fill):.2f}")
    data = bytes(64)

    def send() -> int:
        for _ in range(WAITING):
            senders[0].send(data)
        return WAITING

    print(f"64 bytes: send {cpu_of(send):.2f}, "
          f"sendmmsg {cpu_of(lambda: sum(batch.send(senders[0], data) for _ in range(50))):.2f}")


if __name__ == "__main__":
    main()

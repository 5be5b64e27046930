"""Servers of tests, each a thread that accepts."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def accepting(listener: socket.socket, serve: Callable[[socket.socket], object]) -> Iterator[None]:
    """Have a thread *serve* one client of *listener* after the other, and end it before the listener.

    A thread that is left in accept() may take a client of the next socket with the same descriptor. Clients
    cause the OSErrors of *serve*, which are ignored.
    """
    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError):
                serve(client)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def in_a_thread(serve: Callable[[socket.socket], object]) -> Callable[[socket.socket], None]:
    """Return a function that serves each client in a thread of its own."""
    return lambda client: threading.Thread(target=serve, args=[client], daemon=True).start()

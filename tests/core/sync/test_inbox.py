"""Calls for one thread: none is lost, and a waiting thread is woken or times out."""

import threading
import time

from kproxy_core.sync.loop import Inbox


def test_calls_are_taken_in_their_order() -> None:
    inbox, done = Inbox(), list[int]()
    for number in range(3):
        inbox.put(lambda number=number: done.append(number))  # type: ignore[misc]
    for call in inbox.take(None):
        call()
    assert done == [0, 1, 2]
    assert inbox.take(0) == []


def test_a_waiting_thread_is_woken() -> None:
    inbox = Inbox()
    threading.Timer(0.05, inbox.put, [lambda: None]).start()
    assert len(inbox.take(None)) == 1


def test_waiting_ends_however_short_it_is() -> None:
    inbox = Inbox()

    def wait_briefly() -> None:
        for number in range(20_000):
            inbox.put(lambda: None)
            while not inbox.take(1):
                pass
            inbox.take((number % 60) / 1_000_000)

    waiting = threading.Thread(target=wait_briefly, daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()


def test_nothing_is_lost_between_two_threads() -> None:
    inbox, taken = Inbox(), 0

    def send() -> None:
        for _ in range(20_000):
            inbox.put(lambda: None)

    sender = threading.Thread(target=send)
    sender.start()
    until = time.monotonic() + 60
    while taken < 20_000 and time.monotonic() < until:
        taken += len(inbox.take(0.00001))
    sender.join()
    assert taken == 20_000

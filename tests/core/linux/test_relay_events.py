"""Timers of the workers' loop."""

import socket
import time
from collections.abc import Mapping
from functools import partial

from kproxy_core.linux.relay.events import READ, Events


def test_a_call_may_schedule_another_with_a_delay_of_its_own() -> None:
    events = Events()
    called: list[int] = []

    def again(argument: int) -> None:
        called.append(argument)
        if argument == 3:
            events.stopped = True
        else:
            events.timeouts(0.01 * (argument + 1)).call(partial(again, argument + 1))

    events.timeouts(0.0).call(partial(again, 0))
    events.run()
    assert called == [0, 1, 2, 3]
    events.epoll.close()


def test_calls_are_made_in_order_and_not_too_early() -> None:
    began = time.monotonic()
    assert _called({0.05: began + 0.05, 0.01: began + 0.01}) == [0.01, 0.05]
    assert time.monotonic() - began >= 0.05


def test_calls_that_are_due_together_are_made_in_order() -> None:
    long_ago = time.monotonic() - 1.0
    assert _called({0.05: long_ago + 0.05, 0.01: long_ago + 0.01}) == [0.01, 0.05]


def _called(due: Mapping[float, float]) -> list[float]:
    """Return the delays of calls in the order in which they are made.

    *due* has the time of each, monotonic seconds: between two calls of `call` any time may pass.
    """
    events = Events()
    called: list[float] = []

    def note(delay: float) -> None:
        called.append(delay)
        events.stopped = len(called) == len(due)

    for delay, when in due.items():
        events.timeouts(delay).waiting.append((when, partial(note, delay)))
    events.run()
    events.epoll.close()
    return called


def test_an_event_before_a_timeout_is_handled_before_it_even_if_both_are_due() -> None:
    events = Events()
    order: list[str] = []

    class Reader:
        def ready(self, fd: int, mask: int) -> None:
            order.append("came")
            events.epoll.unregister(fd)

    def over() -> None:
        order.append("over")
        events.stopped = True

    ours, theirs = socket.socketpair()
    with ours, theirs:
        events.watch(ours.fileno(), Reader(), READ)
        events.timeouts(0.0).call(over)
        theirs.send(b"!")
        events.run()
    assert order == ["came", "over"]
    events.epoll.close()

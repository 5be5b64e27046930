"""Timers of the workers' loop."""

import socket
import time
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
    events = Events()
    began = time.monotonic()
    called: list[int] = []

    def note(argument: int) -> None:
        called.append(argument)
        events.stopped = argument == 2

    events.timeouts(0.05).call(partial(note, 2))
    events.timeouts(0.01).call(partial(note, 1))
    events.run()
    assert called == [1, 2]
    assert time.monotonic() - began >= 0.05
    events.epoll.close()


def test_calls_that_are_due_together_are_made_in_order() -> None:
    events = Events()
    called: list[int] = []

    def note(argument: int) -> None:
        called.append(argument)
        events.stopped = argument == 2

    events.timeouts(0.02).call(partial(note, 2))
    events.timeouts(0.01).call(partial(note, 1))
    time.sleep(0.03)  # as on a busy machine
    events.run()
    assert called == [1, 2]
    events.epoll.close()


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

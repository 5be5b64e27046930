"""A relay worker that hangs: the other workers serve, and changes of Services do not wait for it."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.core.processes import Proxy
from tests.shortage.node import Node, node, vip, vip6

TWO = {"userspace": {"workers": 2}}
SOME = 20
"""More connections than one worker gets by chance."""


def workers(here: Node) -> list[int]:
    """Return the process ids of the relay workers on the node."""
    found = []
    for pid in map(int, here.network.run("ip", "netns", "pids", here.network.name).split()):
        with suppress(OSError):
            if b"relay.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return sorted(found)


def is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def is_answered(client: socket.socket) -> bool:
    """Return whether a relayed connection still works, soon."""
    client.settimeout(1.0)
    with suppress(OSError):
        client.sendall(b"?")
        return client.recv(1) == b"?"
    return False


def assert_all_answer(here: Node, *addresses: str) -> None:
    for address in addresses:
        assert [here.answers(address) for _ in range(SOME)] == [True] * SOME


@contextmanager
def stopping_the_first_worker(here: Node) -> Iterator[list[int]]:
    """Stop the first worker that is started from now on, as soon as it exists. Yield its process id."""
    known, stopped = workers(here), list[int]()
    ended = threading.Event()

    def stop() -> None:
        while not (stopped or ended.is_set()):
            for pid in set(workers(here)) - set(known):
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
                break
            time.sleep(0.001)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield stopped
    finally:
        ended.set()
        thread.join()


@contextmanager
def serving(directory: Path, mode: str = "userspace", count: int = 2) -> Iterator[tuple[Node, Proxy]]:
    """A node with a Service in each family, and its proxy."""
    with node(directory, mode, backend_options={"userspace": {"workers": count}}) as here:
        here.serve(1)
        here.serve6(1)
        with here.proxy() as proxy:
            here.await_answer(vip(1))
            here.await_answer(vip6(1))
            yield here, proxy


def test_a_change_does_not_wait_for_a_worker_that_hangs_and_is_replaced(tmp_path: Path) -> None:
    with serving(tmp_path) as (here, proxy), ExitStack() as stack:
        before = workers(here)
        clients = [
            stack.enter_context(here.dial(address)) for address in (vip(1), vip6(1)) for _ in range(SOME)]
        assert [client.recv(1) for client in clients] == [b"!"] * len(clients)
        os.kill(before[0], signal.SIGSTOP)
        for number in range(2, 5):
            here.serve(number)
            here.serve6(number)
            here.await_answer(vip(number))
            here.await_answer(vip6(number))
        assert_all_answer(here, vip(2), vip6(2))  # The one that hangs does not listen there.
        assert is_stopped(before[0]), "nothing waited for its end"
        assert f"relay worker {before[0]} does not answer" in proxy.health()[1]
        well = [client for client in clients if is_answered(client)]
        assert well
        here.await_log(f"relay worker hangs, killing it pid={before[0]}")
        here.await_true(lambda: len(workers(here)) == 2 and before[0] not in workers(here), "another worker")
        (other,) = set(workers(here)) - {before[1]}
        here.await_true(lambda: listeners(here, other) == listeners(here, before[1]), "takeover")
        assert_all_answer(here, vip(1), vip6(1), vip(4), vip6(4))
        assert all(map(is_answered, well))
        here.await_true(lambda: "does not answer" not in proxy.health()[1], "recovery in /healthz")


def listeners(here: Node, pid: int) -> int:
    """Return at how many ports a worker listens."""
    return here.network.run("ss", "-Hltnp").count(f"pid={pid},")


def test_a_worker_that_answers_again_gets_what_it_missed(tmp_path: Path) -> None:
    with serving(tmp_path) as (here, proxy):
        late, other = workers(here)
        os.kill(late, signal.SIGSTOP)
        here.serve(2)
        here.delete(1)
        here.await_answer(vip(2))
        os.kill(late, signal.SIGCONT)
        here.await_log(f"relay worker answers again pid={late}")
        here.serve(3)
        here.await_true(lambda: listeners(here, late) == listeners(here, other) == 3, "same listeners")
        assert workers(here) == [late, other]
        assert_all_answer(here, vip(2), vip(3), vip6(1))
        here.await_true(lambda: "does not answer" not in proxy.health()[1], "recovery in /healthz")


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_that_hangs_at_its_start_is_replaced(tmp_path: Path, count: int) -> None:
    with node(tmp_path, "userspace", backend_options={"userspace": {"workers": count}}) as here:
        here.serve(1)
        here.serve6(1)
        with stopping_the_first_worker(here) as stopped, here.proxy() as proxy:
            if count == 2:
                here.await_answer(vip(1))
                assert is_stopped(*stopped)
            problem = f"relay worker {stopped[0]} does not answer"
            here.await_true(lambda: problem in proxy.health()[1], problem)
            here.await_log(f"relay worker hangs, killing it pid={stopped[0]}")
            here.await_true(lambda: "problems" not in proxy.health()[1], "recovery")
            assert_all_answer(here, vip(1), vip6(1))


def test_no_switch_to_relays_of_which_some_hang(tmp_path: Path) -> None:
    with serving(tmp_path, "nftables") as (here, proxy), stopping_the_first_worker(here) as stopped:
        with pytest.raises(AssertionError, match="does not answer"):
            here.command("switch", "userspace")
        assert stopped
        assert proxy.get(10249, "/proxyMode")[1] == "nftables"
        assert_all_answer(here, vip(1), vip6(1))
        here.serve(2)
        here.await_answer(vip(2))
        here.await_true(lambda: not workers(here), "end of the workers")
        here.command("switch", "userspace")
        assert_all_answer(here, vip(1), vip6(1), vip(2))


def test_a_switch_away_from_relays_of_which_some_hang(tmp_path: Path) -> None:
    with serving(tmp_path) as (here, _):
        os.kill(workers(here)[0], signal.SIGSTOP)
        here.command("switch", "nftables")
        assert_all_answer(here, vip(1), vip6(1))
        here.await_true(lambda: not workers(here), "end of the workers")


@pytest.mark.parametrize("mode", ["userspace", "nftables"])
def test_a_worker_that_hangs_is_killed_when_the_proxy_ends(tmp_path: Path, mode: str) -> None:
    with node(tmp_path, mode, nodePortAddresses=["localhost", "primary"]) as here:
        here.serve(1, 30080)
        with here.proxy() as proxy:
            here.await_answer("127.0.0.1", 30080)
            for worker in workers(here):
                os.kill(worker, signal.SIGSTOP)
            if mode == "nftables":
                here.serve(2, 30081)  # An order is under way.
                here.await_answer(vip(2))
            assert proxy.end()[0] == 0
            assert not workers(here)




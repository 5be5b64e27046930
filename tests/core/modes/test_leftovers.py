"""Taking a node over: rules of others are deleted once kproxy's are proven to work, and not before."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kproxy_core.modes import switch
from kproxy_core.modes.switch import prove
from kproxy_core.modes.takeover import Takeover
from tests.core.modes.switch_room import SETTINGS, V4, Room, names


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    room.rig.health.hold("what others left has not been removed yet")
    room.start()
    yield room
    room.stop()


def heir(room: Room) -> Takeover:
    return Takeover(
        room.registry, lambda mode: SETTINGS, room.switch, room.retiring, room.rig.health, retry=0.01)


def await_that(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        threading.Event().wait(0.01)
    pytest.fail("not after 10 s")


def ready(room: Room) -> bool:
    return room.rig.health.healthz().status == 200


def test_without_leftovers_nothing_is_deleted(room: Room) -> None:
    heir(room).start()
    await_that(lambda: ready(room))
    assert room.story == []


def test_rules_of_another_mode_are_deleted_after_the_proof(room: Room) -> None:
    room.new.rules = dict(room.old.rules)
    heir(room).start()
    await_that(lambda: ready(room))
    assert room.story == ["old full", "retire new, 0 left", "clean up new"]
    assert names(room.old) == {"web"}


def test_rules_of_kube_proxy_in_the_same_mode_are_deleted_after_the_proof(room: Room) -> None:
    room.old.strangers = True
    heir(room).start()
    await_that(lambda: ready(room))
    assert room.story == ["old full", "supersede in old"]


def test_without_a_proof_nothing_is_deleted_and_readiness_waits(room: Room) -> None:
    room.new.rules = dict(room.old.rules)
    room.old.restless = True
    heir(room).start()
    kept = b"the leftovers of new are kept: old: the kernel does not hold"
    await_that(lambda: kept in room.rig.health.healthz().body)
    assert not ready(room)
    assert names(room.new) == {"web"}
    room.old.restless = False
    await_that(lambda: ready(room))
    assert names(room.new) == set()


def test_damage_during_the_proof_is_repaired(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove_and_flush(*arguments: Any) -> None:
        prove(*arguments)
        room.old.rules.clear()
        assert room.old.damaged is not None
        room.old.damaged(V4, "flushed")

    monkeypatch.setattr(switch, "prove", prove_and_flush)
    room.rig.clock.now += 60.0  # the rest after the first sync is over
    room.new.rules = dict(room.old.rules)
    heir(room).start()
    await_that(lambda: ready(room))
    await_that(lambda: names(room.old) == {"web"})


def test_connections_that_are_waited_for_do_not_hold_readiness_up(room: Room) -> None:
    room.new.rules = dict(room.old.rules)
    room.new.connections = 3
    heir(room).start()
    await_that(lambda: ready(room))
    assert names(room.new) == {"web"}
    (measured,) = room.retiring.measure()
    assert (measured.value, measured.labels) == (3, {"mode": "new"})


def test_a_mode_that_serves_by_now_is_spared(room: Room) -> None:
    room.new.rules = dict(room.old.rules)
    room.to("new")
    room.retiring.retire("new")
    assert names(room.new) == {"web"}

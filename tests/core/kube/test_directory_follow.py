"""Files that appear, change and vanish in every way that editors and tools have."""

import itertools
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest

from kproxy_conformance.builders import service_name
from kproxy_conformance.network.patience import patience
from kproxy_conformance.open_files import open_files
from kproxy_core.kube import directory
from kproxy_core.kube.directory import GRACE, DirectorySource
from kproxy_core.model.events import Complete, ServiceGone
from tests.core.directory_rig import State, followed, service, serving, text, wait_past_everything
from tests.patience import PATIENCE


@pytest.fixture
def grace() -> float:
    """Seconds before a missing file is gone."""
    return GRACE


@pytest.fixture
def state(tmp_path: Path, grace: float) -> Iterator[State]:
    """Follows a directory in which one Service is known already."""
    (tmp_path / "web.yaml").write_text(text(service("web")))
    with followed(tmp_path, grace) as state:
        state.wait(lambda s: s.store.complete)
        assert state.services == {"web": 80}
        yield state


def ever_gone(state: State, name: str) -> bool:
    """Return whether the Service was ever announced as deleted."""
    return ServiceGone(service_name(name)) in itertools.chain.from_iterable(state.batches)


def test_everything_that_exists_is_delivered_before_complete(tmp_path: Path) -> None:
    for i in range(600):
        content = service(f"s{i}", ip=f"10.96.{i // 250}.{i % 250 + 1}")
        (tmp_path / f"{i}.json").write_text(json.dumps(content))
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        assert len(state.services) == 600
        last = [event for event in state.batches[-1] if isinstance(event, Complete)]
        assert {event.source for event in last} == set(DirectorySource.kinds)


def test_an_empty_directory_is_complete(tmp_path: Path) -> None:
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        assert state.services == {}


def test_a_new_file(state: State, tmp_path: Path) -> None:
    (tmp_path / "other.yml").write_text(text(service("other")))
    state.wait(serving(web=80, other=80))
    assert not ever_gone(state, "web")
    assert state.bad == []


def test_a_file_written_again(state: State, tmp_path: Path) -> None:
    for port in range(81, 101):
        (tmp_path / "web.yaml").write_text(text(service("web", port=port)))
        state.wait(serving(web=port))
    assert not ever_gone(state, "web")


def test_a_file_renamed_over_another(state: State, tmp_path: Path) -> None:
    for port in range(81, 101):
        (tmp_path / ".web.yaml.tmp").write_text(text(service("web", port=port)))
        os.rename(tmp_path / ".web.yaml.tmp", tmp_path / "web.yaml")
        state.wait(serving(web=port))
    assert not ever_gone(state, "web")


def test_a_file_removed(state: State, tmp_path: Path) -> None:
    (tmp_path / "web.yaml").unlink()
    state.wait(serving())
    assert state.bad == []


def test_a_removal_takes_effect_before_later_changes(state: State, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.yaml").write_text(text(service(name)))
        state.wait(lambda s, name=name: name in s.services)  # type: ignore[misc]
    for gone, new in (("web", "a"), ("one", "b"), ("two", "c"), ("three", "d")):
        (tmp_path / f"{gone}.yaml").unlink()
        (tmp_path / f".{new}").write_text(text(service(new)))
        (tmp_path / f".{new}").rename(tmp_path / f"{new}.yaml")
        state.wait(lambda s, new=new: new in s.services)  # type: ignore[misc]
        assert gone not in state.services


@pytest.mark.parametrize("grace", [1.0], ids=["longer than a busy machine's pauses"])
def test_files_that_vanish_all_the_time_delay_no_change(state: State, tmp_path: Path) -> None:
    begun, seen = threading.Event(), threading.Event()

    def come_and_go() -> None:
        for number in itertools.count():
            if seen.is_set():
                return
            path = tmp_path / f"{number}.yaml"
            path.write_text(text(service(f"s{number}")))
            path.unlink()
            if number == 10:
                begun.set()
            time.sleep(0.001)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        begun.wait()
        (tmp_path / "other.yaml").write_text(text(service("other")))
        state.wait(lambda s: "other" in s.services)
        assert thread.is_alive(), "files still come and go"
    finally:
        seen.set()
        thread.join()


def test_a_file_moved_away_and_back(
    state: State, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "web.yaml"
    (tmp_path / "web.yaml").rename(elsewhere)
    state.wait(serving())
    elsewhere.rename(tmp_path / "web.yaml")
    state.wait(serving(web=80))
    assert state.bad == []


def test_a_file_renamed_in_place_is_no_change(state: State, tmp_path: Path) -> None:
    (tmp_path / "web.yaml").rename(tmp_path / "shop.yaml")
    wait_past_everything(state, tmp_path)
    assert state.services == {"web": 80}
    assert not ever_gone(state, "web")
    assert state.bad == []


def test_a_file_renamed_to_something_that_is_no_manifest(state: State, tmp_path: Path) -> None:
    (tmp_path / "web.yaml").rename(tmp_path / "web.yaml.disabled")
    state.wait(serving())
    assert state.bad == []


def test_a_hard_link(state: State, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "other"
    elsewhere.write_text(text(service("other")))
    os.link(elsewhere, tmp_path / "other.yaml")
    state.wait(serving(web=80, other=80))
    assert state.bad == []


def test_a_nameless_file_linked_into_place(state: State, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_PATH)
    file = os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY, 0o644)
    try:
        os.write(file, text(service("other")).encode())
        os.link(f"/proc/self/fd/{file}", "other.yaml", dst_dir_fd=folder)
        state.wait(serving(web=80, other=80))
        assert state.bad == []
    finally:
        os.close(file)
        os.close(folder)


# --- editors and half-written files


def test_a_half_written_file_is_not_read_until_it_is_closed(state: State, tmp_path: Path) -> None:
    """Half of it is valid YAML, too: without the second object."""
    (tmp_path / "both.yaml").write_text(text(service("one"), service("two", ip="10.96.0.2")))
    state.wait(lambda s: len(s.services) == 3)
    with open(tmp_path / "both.yaml", "w") as file:
        wait_past_everything(state, tmp_path)
        file.write(text(service("one", port=81)))
        file.flush()
        wait_past_everything(state, tmp_path)
        assert state.services == {"web": 80, "one": 80, "two": 80}
        file.write(text(service("two", ip="10.96.0.2", port=82)))
    state.wait(serving(web=80, one=81, two=82))
    assert not ever_gone(state, "one")
    assert not ever_gone(state, "two")
    assert state.bad == []


def test_a_new_file_is_not_read_until_it_is_closed(state: State, tmp_path: Path) -> None:
    with open(tmp_path / "new.yaml", "w") as file:
        file.write(text(service("one")))
        file.flush()
        wait_past_everything(state, tmp_path)
        assert "one" not in state.services
    state.wait(lambda s: "one" in s.services)


def test_a_json_file_is_read_once_it_is_complete_though_never_closed(state: State, tmp_path: Path) -> None:
    content = json.dumps(service("one"))
    with open(tmp_path / "one.json", "w") as file:
        file.write(content[:-1])
        file.flush()
        wait_past_everything(state, tmp_path)
        assert "one" not in state.services
        file.write(content[-1])
        file.flush()
        state.wait(lambda s: "one" in s.services)
    assert state.bad == []


def test_a_file_closed_half_written_is_reported_and_changes_nothing(state: State, tmp_path: Path) -> None:
    (tmp_path / "web.yaml").write_text("apiVersion: v1\nkind: Service\nmetadata: {name: web")
    state.wait(lambda s: s.bad)
    assert state.services == {"web": 80}
    assert state.complaints[0].startswith("file web.yaml: is not YAML")
    (tmp_path / "web.yaml").write_text(text(service("web", port=81)))
    state.wait(serving(web=81))


def test_a_file_emptied_changes_nothing(state: State, tmp_path: Path) -> None:
    (tmp_path / "web.yaml").write_text("")
    state.wait(lambda s: s.complaints == ["file web.yaml: is empty"])
    assert state.services == {"web": 80}


@pytest.mark.parametrize("grace", [0.2 * patience()], ids=["the time of two system calls"])
def test_an_editor_that_moves_the_old_file_aside_first(state: State, tmp_path: Path) -> None:
    """As vim does, with ``backupcopy=no``."""
    for port in range(81, 84):
        (tmp_path / "web.yaml").rename(tmp_path / "web.yaml~")
        with open(tmp_path / "web.yaml", "w") as file:
            file.write(text(service("web", port=port)))
            wait_past_everything(state, tmp_path)
        (tmp_path / "web.yaml~").unlink()
        state.wait(serving(web=port))
    assert not ever_gone(state, "web")


@pytest.mark.parametrize("grace", [PATIENCE], ids=["nothing is gone for good"])
def test_a_tool_that_removes_the_file_first(state: State, tmp_path: Path) -> None:
    """As git does."""
    for port in range(81, 101):
        (tmp_path / "web.yaml").unlink()
        (tmp_path / "web.yaml").write_text(text(service("web", port=port)))
        state.wait(serving(web=port))
    assert not ever_gone(state, "web")


@pytest.mark.parametrize("name", [
    ".web.yaml", ".web.yaml.swp", "web.yaml~", "#web.yaml#", ".#web.yaml", "4913", "web.yaml.tmp",
    "web.yaml.bak", "web.txt", "yaml", "web.YAML.swp", "kustomization",
])
def test_files_that_are_no_manifests(state: State, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(text(service("other")))
    wait_past_everything(state, tmp_path)
    assert state.services == {"web": 80}
    assert state.bad == []


def test_subdirectories_are_ignored(state: State, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").mkdir()
    (tmp_path / "more.yaml" / "other.yaml").write_text(text(service("other")))
    wait_past_everything(state, tmp_path)
    assert state.services == {"web": 80}
    assert state.bad == []


def test_a_pipe_does_not_block(state: State, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    wait_past_everything(state, tmp_path)
    assert state.complaints == ["file pipe.yaml: is not a regular file"]
    assert state.services == {"web": 80}


def test_a_file_too_large(state: State, tmp_path: Path) -> None:
    with open(tmp_path / "huge.yaml", "w") as file:
        file.truncate((16 << 20) + 1)
    wait_past_everything(state, tmp_path)
    assert state.complaints == ["file huge.yaml: is larger than 16 MiB"]
    assert state.services == {"web": 80}


def test_names_that_would_break_a_log_line(state: State, tmp_path: Path) -> None:
    strange = os.fsencode(tmp_path) + b"/a\n\"\xff.yaml"
    with open(strange, "w") as file:
        file.write("{")
    state.wait(lambda s: s.bad)
    assert state.complaints[0].isprintable()
    assert state.complaints[0].isascii()
    with open(strange, "w") as file:
        file.write(text(service("other")))
    state.wait(lambda s: "other" in s.services)


# --- bursts


def test_a_burst_on_one_file_ends_with_its_last_content(state: State, tmp_path: Path) -> None:
    for port in range(1, 501):
        (tmp_path / "web.yaml").write_text(text(service("web", port=port)))
    state.wait(serving(web=500))
    assert not ever_gone(state, "web")


def test_more_changes_than_the_kernel_remembers(state: State, tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    count = limit // 3 + 500  # each file makes three notices
    before = len(state.batches)
    (tmp_path / "web.yaml").write_text(text(service("web", port=81)))
    with state.holding_up():
        for i in range(count):
            content = service(f"s{i}", ip=f"10.97.{i // 250}.{i % 250 + 1}")
            (tmp_path / f"{i}.json").write_text(json.dumps(content))
        (tmp_path / "web.yaml").unlink()
    state.wait(lambda s: len(s.services) == count)
    assert "web" not in state.services
    assert len(state.batches) > before


def test_a_file_created_and_removed_at_once(state: State, tmp_path: Path) -> None:
    for _ in range(500):
        (tmp_path / "brief.yaml").write_text(text(service("brief")))
        (tmp_path / "brief.yaml").unlink()
    wait_past_everything(state, tmp_path)
    assert state.services == {"web": 80}


def test_a_change_reads_no_other_file(tmp_path: Path) -> None:
    for i in range(50):
        (tmp_path / f"{i}.yaml").write_text(text(service(f"s{i}", ip=f"10.96.0.{i + 1}", port=80)))
    with ExitStack() as mapped:
        memories = [
            mapped.enter_context(mmap.mmap(mapped.enter_context(open(path, "r+b")).fileno(), 0))
            for path in tmp_path.iterdir()
        ]
        with followed(tmp_path) as state:
            state.wait(lambda s: s.store.complete)
            for memory in memories:
                # inotify does not report writes through memory; the next read sees them.
                at = memory.find(b'"port": 80')
                memory[at:at + 10] = b'"port": 99'
            (tmp_path / "0.yaml").write_text(text(service("s0", ip="10.96.0.1", port=81)))
            wait_past_everything(state, tmp_path)
            assert state.services == {"s0": 81} | {f"s{i}": 80 for i in range(1, 50)}


def test_no_event_follows_a_stop(tmp_path: Path) -> None:
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
    before = len(state.batches)
    (tmp_path / "web.yaml").write_text(text(service("web")))
    with followed(tmp_path) as second:
        second.wait(serving(web=80))
    assert len(state.batches) == before


def test_stopping_closes_every_descriptor(tmp_path: Path) -> None:
    before = open_files(os.getpid())
    for _ in range(3):
        with followed(tmp_path) as state:
            state.wait(lambda s: s.store.complete)
    assert not open_files(os.getpid()).items() - before.items()


# --- files that are being written when the directory is first read


def written_just_now(path: Path) -> None:
    """Have the file look as if it was written a moment ago, however long the test takes."""
    later = time.time() + 3600
    os.utime(path, (later, later))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that waits for writers as long as the test may take."""
    for name in ("_DOUBT", "_LONGEST_DOUBT"):
        monkeypatch.setattr(directory, name, PATIENCE)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("name", "begun"), [("cut.yaml", ""), ("cut.yaml", "kind: Service\nspec: {ports: ["), ("cut.json", "{")])
def test_nothing_is_complete_before_a_file_that_is_being_written(
    tmp_path: Path, said: SimpleQueue[str], name: str, begun: str
) -> None:
    (tmp_path / "web.yaml").write_text(text(service("web")))
    with open(tmp_path / name, "w") as file, followed(tmp_path) as state:
        file.write(begun)
        file.flush()
        written_just_now(tmp_path / name)
        state.wait(serving(web=80))
        wait_past_everything(state, tmp_path)
        assert not state.store.complete
        file.seek(0)
        file.write(json.dumps(service("cut")))
        file.flush()
        file.truncate()
        file.close()
        state.wait(lambda s: s.store.complete)
        assert state.services == {"web": 80, "cut": 80}
        assert state.bad == []
    assert [said.get() for _ in range(said.qsize())] == ["directory of manifests read"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("objects", [1, 100])
def test_no_look_misses_an_object_whose_file_is_written_all_the_time(tmp_path: Path, objects: int) -> None:
    content = text(*(service(f"s{i}", ip=f"10.96.0.{i + 1}") for i in range(objects)))
    (tmp_path / "web.yaml").write_text(content)
    ended = threading.Event()

    def rewrite() -> None:
        while not ended.wait(0.002):
            with open(tmp_path / "web.yaml", "w", buffering=1) as file:
                file.writelines(content.splitlines(keepends=True))

    thread = threading.Thread(target=rewrite)
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        thread.start()
        try:
            for _ in range(50):
                with followed(tmp_path) as look:
                    look.wait(lambda s: s.store.complete)
                    assert len(look.services) == objects
                    assert look.bad == []
        finally:
            ended.set()
            thread.join()
        assert not any(ever_gone(state, f"s{i}") for i in range(objects))
        assert state.bad == []


def test_a_file_that_is_written_endlessly_keeps_no_other_from_being_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_DOUBT", PATIENCE)
    monkeypatch.setattr(directory, "_LONGEST_DOUBT", 0.1)
    (tmp_path / "other.yaml").write_text(text(service("other")))
    with open(tmp_path / "web.yaml", "w") as file:
        written_just_now(tmp_path / "web.yaml")
        with followed(tmp_path) as state:
            state.wait(lambda s: s.store.complete)
            assert state.services == {"other": 80}
            assert state.complaints == ["file web.yaml: is being written, and is used once it is closed"]
            file.write(text(service("web")))
            file.close()
            state.wait(serving(web=80, other=80))


def test_a_file_that_was_left_broken_is_reported_before_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_DOUBT", 0.1)
    monkeypatch.setattr(directory, "_LONGEST_DOUBT", PATIENCE)
    (tmp_path / "empty.yaml").touch()
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        assert state.complaints == ["file empty.yaml: is empty"]


def test_a_start_waits_for_no_file_that_is_whole_and_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GRACE", "_DOUBT", "_LONGEST_DOUBT"):
        monkeypatch.setattr(directory, name, 2 * PATIENCE)
    for name in ("web", "other"):
        (tmp_path / f"{name}.yaml").write_text(text(service(name)))
        os.utime(tmp_path / f"{name}.yaml", (1e9, 1e9))
    os.mkfifo(tmp_path / "pipe.yaml")
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        assert state.services == {"web": 80, "other": 80}

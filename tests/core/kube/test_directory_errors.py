"""Manifests that can't be read for a moment are read later, and no object is lost."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from kproxy_core.kube import directory
from kproxy_core.kube.directory import DirectorySource
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.files import Inotify
from tests.core.directory_rig import NODE, followed, service, serving, text
from tests.patience import PATIENCE


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Have this process hold as many descriptors as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            held.extend(iter(lambda: os.dup(0), None))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def wait_for(said: "SimpleQueue[str]", message: str) -> None:
    while said.get(timeout=PATIENCE) != message:
        pass


def test_a_manifest_that_changed_without_a_descriptor_left_is_read_later(
    tmp_path: Path, said: "SimpleQueue[str]",
) -> None:
    (tmp_path / "web.yaml").write_text(text(service("web")))
    (tmp_path / "next").write_text(text(service("web", port=81)))
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        with no_descriptors_left():
            (tmp_path / "next").rename(tmp_path / "web.yaml")
            wait_for(said, "cannot read a manifest, retrying")
            assert state.services == {"web": 80}
        state.wait(serving(web=81))
        wait_for(said, "all manifests can be read again")
    assert state.complaints == []


def test_nothing_is_complete_before_the_directory_could_be_read(
    tmp_path: Path, said: "SimpleQueue[str]", monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "web.yaml").write_text(text(service("web")))
    failures = [24, 24, 24]  # EMFILE
    scandir = os.scandir

    def failing(path: str) -> object:
        if failures:
            raise OSError(failures.pop(), "Too many open files", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    with followed(tmp_path) as state:
        wait_for(said, "cannot list the directory of manifests, retrying")
        state.wait(lambda s: s.store.complete)
        assert state.services == {"web": 80}


def test_a_start_without_descriptors_says_what_it_needs_one_for(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path, NODE)
    with no_descriptors_left(), pytest.raises(HostError, match="cannot watch the directory of manifests"):
        source.start(lambda _: None)


def test_a_directory_that_cannot_be_watched_is_tried_again(
    tmp_path: Path, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "web.yaml").write_text(text(service("web")))
    watch = Inotify.watch
    has_room = False

    def failing(self: Inotify, path: str, mask: int) -> int:
        if path == str(tmp_path) and not has_room:
            raise OSError(28, "No space left on device")  # the user has too many watches
        return watch(self, path, mask)

    monkeypatch.setattr(Inotify, "watch", failing)
    reports: SimpleQueue[str] = SimpleQueue()
    with followed(tmp_path, report=reports.put) as state:
        wait_for(said, "cannot watch the directory of manifests, retrying")
        told = reports.get(timeout=PATIENCE)
        assert told == f"directory {tmp_path} cannot be watched: No space left on device"
        has_room = True
        state.wait(serving(web=80))
        (tmp_path / "web.yaml").write_text(text(service("web", port=81)))
        state.wait(serving(web=81))
    while reports.get(timeout=PATIENCE):
        pass


@pytest.mark.parametrize("error", [24, 5], ids=["EMFILE", "EIO"])
def test_only_a_lack_of_resources_delays_other_objects(
    tmp_path: Path, said: "SimpleQueue[str]", monkeypatch: pytest.MonkeyPatch, error: int,
) -> None:
    for name in ("bad", "web"):
        (tmp_path / f"{name}.yaml").write_text(text(service(name, ip=f"10.96.0.{len(name)}")))
    opened = directory._open
    failing = True

    def fail_for_bad(path: str, flags: int) -> int:
        if failing and path.endswith("bad.yaml"):
            raise OSError(error, os.strerror(error), path)
        return opened(path, flags)

    monkeypatch.setattr(directory, "_open", fail_for_bad)
    with followed(tmp_path) as state:
        state.wait(lambda s: "web" in s.services)
        if error == 5:
            state.wait(lambda s: s.store.complete)
        assert state.store.complete == (error == 5)
        failing = False
        state.wait(lambda s: s.store.complete and "bad" in s.services)
    assert state.complaints == []


def test_a_manifest_that_was_corrected_is_logged(tmp_path: Path, said: SimpleQueue[str]) -> None:
    path = tmp_path / "web.yaml"
    path.write_text("a: [")
    with followed(tmp_path) as state:
        state.wait(lambda s: s.complaints)
        path.write_text(text(service("web")))
        state.wait(serving(web=80))
        while said.get(timeout=PATIENCE) != "manifest was corrected, all of it is used":
            pass
        path.write_text(text(service("web", port=81)))
        state.wait(serving(web=81))
    while not said.empty():
        assert said.get() != "manifest was corrected, all of it is used"


def test_a_large_manifest_that_is_read_later_is_waited_for(
    tmp_path: Path, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "web.yaml").write_text(text(service("web")) + "#" * directory._LARGE + "\n")
    opened, failures = directory._open, [24]

    def fail_once(path: str, flags: int) -> int:
        if failures:
            raise OSError(failures.pop(), "Too many open files", path)
        return opened(path, flags)

    monkeypatch.setattr(directory, "_open", fail_once)
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        assert state.services == {"web": 80}
        wait_for(said, "all manifests can be read again")
    assert state.complaints == []

"""Changes of a file's content are noticed, however they are made; other events are not."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kproxy_core.linux.files import FileWatch


@contextmanager
def watching(path: Path, content: bytes = b"old") -> Iterator[threading.Event]:
    changed = threading.Event()
    watch = FileWatch(str(path), content, lambda: changed.set())
    try:
        yield changed
    finally:
        watch.close()


def write(path: Path) -> None:
    path.write_bytes(b"new")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"new")
    other.rename(path)


def remove_and_create(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"new")


def link(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"new")
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("change", [write, replace, remove_and_create, link])
def test_a_change_is_noticed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"old")
    with watching(path) as changed:
        change(path)
        assert changed.wait(120)


def test_a_change_before_the_watch_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"new")
    with watching(path) as changed:
        assert changed.wait(120)


def config_map(directory: Path, version: str, content: bytes) -> None:
    """Update a mounted ConfigMap as the kubelet does."""
    (directory / version).mkdir(parents=True)
    (directory / version / "config.yaml").write_bytes(content)
    (directory / "..data_tmp").symlink_to(version)
    os.rename(directory / "..data_tmp", directory / "..data")
    if not (directory / "config.yaml").is_symlink():
        (directory / "config.yaml").symlink_to("..data/config.yaml")


def test_an_update_of_a_mounted_config_map_is_noticed(tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    config_map(mounted, "..1", b"old")
    with watching(mounted / "config.yaml") as changed:
        config_map(mounted, "..2", b"old")
        assert not changed.wait(0.3), "the content is the same"
        config_map(mounted, "..3", b"new")
        assert changed.wait(120)


def test_events_that_leave_the_content_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"old")
    with watching(path) as changed:
        path.write_bytes(b"old")
        path.chmod(0o600)
        (tmp_path / "neighbour.yaml").write_bytes(b"new")
        path.unlink()
        assert not changed.wait(0.3)
        path.write_bytes(b"old")
        assert not changed.wait(0.3)
        path.write_bytes(b"new")
        assert changed.wait(120)

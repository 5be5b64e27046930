"""Large manifests, which are parsed while other files change."""

import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from kproxy_conformance.builders import service_name
from kproxy_core.kube import directory
from kproxy_core.kube.directory import Manifest
from kproxy_core.model.events import ServiceGone
from tests.core.directory_rig import Json, State, followed, service, serving, text

LARGE, HUGE = 64 << 10, 2 << 20


def padded(size: int, *objects: Json) -> str:
    """Return a YAML file of *size* bytes with *objects*."""
    content = text(*objects)
    return content + "#" * (size - len(content) - 1) + "\n"


def ever_gone(state: State, name: str) -> bool:
    """Return whether the Service was ever announced as deleted."""
    return ServiceGone(service_name(name)) in chain.from_iterable(state.batches)


def change(state: State, directory: Path) -> None:
    """Return once all that was done to the directory before was dealt with, if only by being held back."""
    for _ in range(3):
        port = state.services.get("next", 80) + 1
        (directory / "next.yaml").write_text(text(service("next", port=port)))
        state.wait(lambda s, port=port: s.services.get("next") == port)  # type: ignore[misc]


class Parser:
    """Parses manifests, but does not finish large ones whose names are in `stuck`."""

    def __init__(self, fill: Callable[[Manifest, str, bytes], Iterator[None]]) -> None:
        self._fill = fill
        self.stuck: set[str] = set()
        self.begun: dict[str, threading.Event] = {}

    def fill(self, manifest: Manifest, name: str, data: bytes) -> Iterator[None]:
        self.begun.setdefault(name, threading.Event()).set()
        yield
        while name in self.stuck and len(data) >= LARGE:
            yield
        yield from self._fill(manifest, name, data)

    def stick(self, path: Path, content: str) -> None:
        """Write a file whose parsing does not end before it is taken from `stuck`."""
        self.stuck.add(path.name)
        self.begun[path.name] = threading.Event()
        path.write_text(content)
        assert self.begun[path.name].wait()


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> Parser:
    parser = Parser(directory.fill)
    monkeypatch.setattr(directory, "fill", parser.fill)
    return parser


@pytest.fixture
def state(tmp_path: Path, parser: Parser) -> Iterator[State]:
    """Follows a directory with a small file."""
    (tmp_path / "web.yaml").write_text(text(service("web"), service("other")))
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        yield state


@pytest.mark.parametrize("size", [LARGE, HUGE])
def test_others_are_used_while_a_large_file_is_parsed(
    state: State, tmp_path: Path, parser: Parser, size: int
) -> None:
    parser.stick(tmp_path / "big.yaml", padded(size, service("big")))
    for port in range(81, 91):
        (tmp_path / "web.yaml").write_text(text(service("web", port=port), service("other")))
        state.wait(serving(web=port, other=80))
    (tmp_path / "new.json").write_text("{")
    state.wait(lambda s: s.bad)
    parser.stuck.clear()
    state.wait(serving(web=90, other=80, big=80))
    assert len(state.bad) == 1


def test_a_huge_file_delays_no_large_one(state: State, tmp_path: Path, parser: Parser) -> None:
    parser.stick(tmp_path / "huge.yaml", padded(HUGE, service("huge")))
    (tmp_path / "large.yaml").write_text(padded(LARGE, service("large")))
    state.wait(serving(web=80, other=80, large=80))
    assert state.bad == []


def test_objects_that_move_into_a_large_file_are_never_gone(
    state: State, tmp_path: Path, parser: Parser
) -> None:
    parser.stick(tmp_path / "big.yaml", padded(LARGE, service("other", port=81)))
    (tmp_path / "web.yaml").write_text(text(service("web", port=81)))
    change(state, tmp_path)
    assert state.services == {"web": 80, "other": 80, "next": 83}
    parser.stuck.clear()
    state.wait(serving(web=81, other=81, next=83))
    assert not ever_gone(state, "other")


def test_a_large_file_that_is_renamed_is_never_gone(state: State, tmp_path: Path, parser: Parser) -> None:
    (tmp_path / "big.yaml").write_text(padded(LARGE, service("big")))
    state.wait(serving(web=80, other=80, big=80))
    parser.stuck.add("new.yaml")
    (tmp_path / "big.yaml").rename(tmp_path / "new.yaml")
    change(state, tmp_path)
    assert "big" in state.services
    parser.stuck.add("last.yaml")
    (tmp_path / "new.yaml").rename(tmp_path / "last.yaml")
    change(state, tmp_path)
    parser.stuck.clear()
    (tmp_path / "web.yaml").unlink()
    state.wait(lambda s: s.services.keys() == {"big", "next"})
    assert not ever_gone(state, "big")


def test_a_removal_waits_for_large_files_only_as_long_as_they_exist(
    state: State, tmp_path: Path, parser: Parser
) -> None:
    parser.stick(tmp_path / "big.yaml", padded(LARGE, service("big")))
    (tmp_path / "web.yaml").unlink()
    change(state, tmp_path)
    assert state.services == {"web": 80, "other": 80, "next": 83}
    (tmp_path / "big.yaml").unlink()
    state.wait(serving(next=83))
    assert state.bad == []


def test_a_removed_file_that_returns_meanwhile_was_never_gone(
    state: State, tmp_path: Path, parser: Parser
) -> None:
    parser.stick(tmp_path / "big.yaml", padded(LARGE, service("big")))
    (tmp_path / "web.yaml").unlink()
    (tmp_path / "brief.yaml").touch()
    (tmp_path / "brief.yaml").unlink()
    change(state, tmp_path)
    (tmp_path / "web.yaml").write_text(text(service("web", port=81), service("other")))
    state.wait(lambda s: s.services["web"] == 81)
    parser.stuck.clear()
    state.wait(lambda s: "big" in s.services)
    assert not ever_gone(state, "web")


def test_a_small_file_in_place_of_a_large_one_is_used_at_once(
    state: State, tmp_path: Path, parser: Parser
) -> None:
    parser.stick(tmp_path / "big.yaml", padded(HUGE, service("big")))
    (tmp_path / "new").write_text(text(service("small")))
    (tmp_path / "new").rename(tmp_path / "big.yaml")
    state.wait(lambda s: "small" in s.services)
    assert state.bad == []


def test_a_large_file_is_used_though_it_changes_faster_than_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LARGE", "_SLICE"):
        monkeypatch.setattr(directory, name, 0)
    ended = threading.Event()

    def rewrite() -> None:
        for port in range(1, 60_000):
            if ended.is_set():
                return
            objects = (service(f"s{i}", ip=f"10.96.0.{i + 1}", port=port) for i in range(200))
            (tmp_path / "web.yaml").write_text(text(*objects))

    thread = threading.Thread(target=rewrite)
    with followed(tmp_path) as state:
        thread.start()
        try:
            ports = {0}
            for _ in range(5):
                state.wait(lambda s: s.services and s.services["s0"] not in ports)
                ports.add(state.services["s0"])
                assert len(state.services) == 200
        finally:
            ended.set()
            thread.join()
        state.wait(lambda s: s.services["s199"] > max(ports))


def test_complete_waits_for_large_files(tmp_path: Path, parser: Parser) -> None:
    (tmp_path / "web.yaml").write_text(text(service("web")))
    parser.stuck.add("big.yaml")
    (tmp_path / "big.yaml").write_text(padded(HUGE, service("big")))
    with followed(tmp_path) as state:
        state.wait(serving(web=80))
        change(state, tmp_path)
        assert not state.store.complete
        parser.stuck.clear()
        state.wait(lambda s: s.store.complete)
        assert state.services == {"web": 80, "big": 80, "next": 83}


def test_a_stop_waits_for_no_large_file(tmp_path: Path, parser: Parser) -> None:
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        parser.stick(tmp_path / "big.yaml", padded(HUGE, service("big")))
    assert state.services == {}

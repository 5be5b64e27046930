"""Symbolic links, mounted ConfigMaps, and a directory that appears, disappears and appears again."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from kproxy_core.kube.reading import shown
from tests.core.directory_rig import State, followed, service, serving, text
from tests.patience import PATIENCE

OTHER = service("other", "10.96.0.2")


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    """A directory, beside which there is room."""
    (tmp_path / "manifests").mkdir()
    return tmp_path / "manifests"


@pytest.fixture
def state(manifests: Path) -> Iterator[State]:
    """Follows it, empty."""
    with followed(manifests) as state:
        state.wait(lambda s: s.store.complete)
        yield state


def write(path: Path, *objects: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(*objects))


def replace_link(link: Path, target: str | Path) -> None:
    """Point *link* elsewhere at one stroke."""
    new = link.with_name(f".{link.name}.new")
    new.symlink_to(target)
    new.rename(link)


# --- linked files


def test_a_link_to_a_file_elsewhere(state: State, manifests: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "shop"
    write(target, service("web"))
    (manifests / "web.yaml").symlink_to(target)
    state.wait(serving(web=80))
    write(target, service("web", port=81))
    state.wait(serving(web=81))
    write(target.with_name("next"), service("web", port=82))
    target.with_name("next").rename(target)
    state.wait(serving(web=82))
    (manifests / "web.yaml").unlink()
    state.wait(serving())
    assert state.bad == []


def test_a_link_that_exists_at_the_start(manifests: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "shop", service("web"))
    (manifests / "web.yaml").symlink_to("../elsewhere/shop")
    with followed(manifests) as state:
        state.wait(serving(web=80))
        write(tmp_path / "elsewhere" / "shop", service("web", port=81))
        state.wait(serving(web=81))
        assert state.bad == []


def test_a_link_pointed_elsewhere(state: State, manifests: Path, tmp_path: Path) -> None:
    write(tmp_path / "one", service("web", port=1))
    write(tmp_path / "two", service("web", port=2))
    (manifests / "web.yaml").symlink_to(tmp_path / "one")
    state.wait(serving(web=1))
    replace_link(manifests / "web.yaml", tmp_path / "two")
    state.wait(serving(web=2))
    write(tmp_path / "two", service("web", port=3))
    state.wait(serving(web=3))
    assert state.bad == []


def test_a_link_replaced_by_a_file_and_back(state: State, manifests: Path, tmp_path: Path) -> None:
    write(tmp_path / "one", service("web", port=1))
    (manifests / "web.yaml").symlink_to(tmp_path / "one")
    state.wait(serving(web=1))
    write(manifests / ".new", service("web", port=2))
    (manifests / ".new").rename(manifests / "web.yaml")
    state.wait(serving(web=2))
    replace_link(manifests / "web.yaml", "../one")
    state.wait(serving(web=1))
    write(tmp_path / "one", service("web", port=3))
    state.wait(serving(web=3))
    assert state.bad == []


def test_a_chain_of_links(state: State, manifests: Path, tmp_path: Path) -> None:
    write(tmp_path / "v1" / "shop.yaml", service("web", port=1))
    write(tmp_path / "v2" / "shop.yaml", service("web", port=2))
    (tmp_path / "current").symlink_to("v1")
    (tmp_path / "shop").symlink_to("current/shop.yaml")
    (manifests / "web.yaml").symlink_to("../shop")
    state.wait(serving(web=1))
    replace_link(tmp_path / "current", "v2")
    state.wait(serving(web=2))
    write(tmp_path / "v2" / "shop.yaml", service("web", port=3))
    state.wait(serving(web=3))
    assert state.bad == []


def test_a_dangling_link_is_reported_and_followed_once_its_target_exists(
    state: State, manifests: Path, tmp_path: Path
) -> None:
    (manifests / "web.yaml").symlink_to(tmp_path / "later")
    state.wait(lambda s: s.complaints == ["file web.yaml: is a symbolic link to nothing"])
    write(tmp_path / "later", service("web"))
    state.wait(serving(web=80))
    assert len(state.bad) == 1, "nothing more is said once the target exists"


def test_a_link_whose_target_vanishes_keeps_its_objects(
    state: State, manifests: Path, tmp_path: Path
) -> None:
    write(tmp_path / "one", service("web"))
    (manifests / "web.yaml").symlink_to(tmp_path / "one")
    state.wait(serving(web=80))
    (tmp_path / "one").unlink()
    state.wait(lambda s: s.complaints == ["file web.yaml: is a symbolic link to nothing"])
    assert state.services == {"web": 80}
    write(tmp_path / "one", service("web", port=81))
    state.wait(serving(web=81))


def test_links_in_a_circle(state: State, manifests: Path) -> None:
    (manifests / "a.yaml").symlink_to("b.yaml")
    (manifests / "b.yaml").symlink_to("a.yaml")
    state.wait(lambda s: any("a.yaml: can't be read" in complaint for complaint in s.complaints))
    write(manifests / "c.yaml", service("web"))
    state.wait(serving(web=80))
    assert not any("c.yaml" in complaint for complaint in state.complaints)


# --- a ConfigMap, as the kubelet mounts and updates it


class ConfigMap:
    """A volume: files are links into ``..data``, which is a link to the current version."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._version = 0

    def update(self, **files: str) -> None:
        self._version += 1
        version = self._volume / f"..2026_{self._version}"
        version.mkdir()
        for name, content in files.items():
            (version / f"{name}.yaml").write_text(content)
        old = (self._volume / "..data").resolve() if self._version > 1 else None
        (self._volume / "..data_tmp").symlink_to(version.name)
        (self._volume / "..data_tmp").rename(self._volume / "..data")
        for name in files:
            if not (self._volume / f"{name}.yaml").is_symlink():
                (self._volume / f"{name}.yaml").symlink_to(f"..data/{name}.yaml")
        for entry in self._volume.glob("*.yaml"):
            if entry.stem not in files:
                entry.unlink()
        if old is not None:
            shutil.rmtree(old)


def test_a_config_map(manifests: Path) -> None:
    volume = ConfigMap(manifests)
    volume.update(web=text(service("web")))
    with followed(manifests) as state:
        state.wait(lambda s: s.store.complete)
        assert state.services == {"web": 80}
        for port in range(81, 91):
            volume.update(web=text(service("web", port=port)))
            state.wait(serving(web=port))
        volume.update(web=text(service("web")), other=text(OTHER))
        state.wait(serving(web=80, other=80))
        volume.update(other=text(OTHER))
        state.wait(serving(other=80))
        assert state.bad == []


# --- the directory itself


def test_a_directory_that_does_not_exist_yet(tmp_path: Path, said: SimpleQueue[str]) -> None:
    problems: list[str] = []
    with followed(tmp_path / "a" / "b" / "manifests", report=problems.append) as state:
        assert "is missing" in said.get(timeout=PATIENCE)
        write(tmp_path / "a" / "other", service("other"))
        write(tmp_path / "a" / "b" / "other", service("other"))
        assert not state.store.complete
        write(tmp_path / "a" / "b" / "manifests" / "web.yaml", service("web"))
        state.wait(serving(web=80))
        state.wait(lambda s: s.store.complete)
        assert said.get(timeout=PATIENCE) == "directory of manifests read"
    assert said.empty()
    assert problems == [f"directory {shown(str(tmp_path / 'a/b/manifests'))} is missing, waiting for it", ""]


def test_a_directory_renamed_into_place(tmp_path: Path) -> None:
    write(tmp_path / "draft" / "manifests" / "web.yaml", service("web"))
    with followed(tmp_path / "live" / "manifests") as state:
        (tmp_path / "draft").rename(tmp_path / "live")
        state.wait(serving(web=80))
        assert state.bad == []


def test_a_directory_moved_away_keeps_its_state_and_another_takes_over(
    state: State, manifests: Path, tmp_path: Path
) -> None:
    write(manifests / "web.yaml", service("web"))
    write(manifests / "other.yaml", OTHER)
    state.wait(serving(web=80, other=80))
    for port in (81, 82):
        write(tmp_path / "next" / "web.yaml", service("web", port=port))
        manifests.rename(tmp_path / f"old{port}")
        write(tmp_path / f"old{port}" / "web.yaml", service("web", port=1))
        (tmp_path / "next").rename(manifests)
        state.wait(serving(web=port))
    write(manifests / "web.yaml", service("web", port=83))
    state.wait(serving(web=83))
    assert state.bad == []


def test_a_directory_removed_and_made_again(state: State, manifests: Path) -> None:
    for port in range(80, 90):
        write(manifests / "web.yaml", service("web", port=port))
        state.wait(serving(web=port))
        shutil.rmtree(manifests)
    write(manifests / "other.yaml", OTHER)
    state.wait(serving(other=80))
    assert state.bad == []


def test_a_directory_replaced_before_the_notices_about_it_are_read(state: State, manifests: Path) -> None:
    write(manifests / "web.yaml", service("web"))
    state.wait(serving(web=80))
    with state.holding_up():
        write(manifests / "web.yaml", service("web", port=81))
        time.sleep(0.2)  # The source waits to deliver this; else it has nothing to mix up.
        shutil.rmtree(manifests)
        write(manifests / "web.yaml", service("web", port=82))
        just_now = time.time() + 3600
        os.utime(manifests / "web.yaml", (just_now, just_now))
    state.wait(serving(web=82))
    assert state.bad == []


def test_a_file_that_is_being_written_while_its_new_directory_is_read(state: State, manifests: Path) -> None:
    write(manifests / "web.yaml", service("web", port=80))
    state.wait(serving(web=80))
    shutil.rmtree(manifests)
    new = manifests.with_name("new")
    new.mkdir()
    write(new / "first.yaml", service("first", port=80))
    with (new / "other.yaml").open("w") as file:
        new.rename(manifests)
        state.wait(lambda s: "first" in s.services)
        file.write(text(OTHER))
    state.wait(serving(first=80, other=80))
    assert state.bad == []


def test_a_directory_that_is_a_link_pointed_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "v1" / "web.yaml", service("web", port=1))
    write(tmp_path / "v2" / "web.yaml", service("web", port=2))
    (tmp_path / "manifests").symlink_to("v1")
    with followed(tmp_path / "manifests") as state:
        state.wait(serving(web=1))
        replace_link(tmp_path / "manifests", "v2")
        state.wait(serving(web=2))
        write(tmp_path / "v2" / "web.yaml", service("web", port=3))
        state.wait(serving(web=3))
        write(tmp_path / "v1" / "web.yaml", service("web", port=4))
        write(tmp_path / "v2" / "other.yaml", OTHER)
        state.wait(serving(web=3, other=80))
        assert state.bad == []


def test_a_link_on_the_way_to_the_directory(tmp_path: Path) -> None:
    write(tmp_path / "v1" / "manifests" / "web.yaml", service("web", port=1))
    write(tmp_path / "v2" / "manifests" / "web.yaml", service("web", port=2))
    (tmp_path / "current").symlink_to(tmp_path / "v1")
    with followed(tmp_path / "current" / "manifests") as state:
        state.wait(serving(web=1))
        replace_link(tmp_path / "current", tmp_path / "v2")
        state.wait(serving(web=2))
        assert state.bad == []


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    write(tmp_path / "manifests", service("web"))
    with followed(tmp_path / "manifests") as state:
        assert state.services == {}
        (tmp_path / "manifests").unlink()
        write(tmp_path / "manifests" / "web.yaml", service("web"))
        state.wait(serving(web=80))


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "manifests" / "web.yaml", service("web"))
    monkeypatch.chdir(tmp_path)
    with followed(Path("manifests")) as state:
        os.chdir("/")
        state.wait(serving(web=80))
        write(tmp_path / "manifests" / "web.yaml", service("web", port=81))
        state.wait(serving(web=81))
        assert state.bad == []

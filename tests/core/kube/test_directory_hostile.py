"""Malformed and hostile manifests among good ones: the good ones work, each bad one is reported once."""

import json
import os
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.directory_rig import State, followed, service, serving, text, wait_past_everything
from tests.core.kube.hostile_objects import GOOD_ENDPOINTS, write
from tests.core.other_user import as_nobody
from tests.core.processes import KPROXY


def unexpected(said: list[str], expected: list[str]) -> tuple[list[str], list[str]]:
    """Return the unexpected complaints, and the expected ones that are missing."""
    said, missing = sorted(said), []
    for wanted in sorted(expected, key=len, reverse=True):
        found = next((line for line in said if line.startswith(wanted)), None)
        if found is None:
            missing.append(wanted)
        else:
            said.remove(found)
    return said, missing


def good_ones_work(state: State) -> bool:
    return state.services == dict.fromkeys(GOOD_ENDPOINTS, 80) and all(
        state.endpoints(name) == addresses for name, addresses in GOOD_ENDPOINTS.items())


def test_good_manifests_work_and_each_bad_one_is_reported_once(tmp_path: Path) -> None:
    expected = write(tmp_path)
    assert len(expected) >= 100
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        assert unexpected(state.complaints, expected) == ([], [])
        assert good_ones_work(state)
        assert all(line.isascii() and line.isprintable() and len(line) < 400 for line in state.complaints)

        # Written again, they are as bad as before: there is nothing new to say.
        for path in tmp_path.iterdir():
            if path.is_file():
                path.write_bytes(path.read_bytes())
        wait_past_everything(state, tmp_path)
        assert len(state.complaints) == len(expected)
        assert good_ones_work(state)


def test_a_file_of_stray_documents_is_refused_with_one_complaint(tmp_path: Path) -> None:
    (tmp_path / "big.yaml").write_text("---\na: b\n" * 100_000)
    (tmp_path / "web.yaml").write_text(text(service("web")))
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        assert state.services == {"web": 80}
        assert state.complaints == ["file big.yaml: more than 1000 documents or items are no API objects"]


def test_complaints_about_one_file_are_limited_and_counted(tmp_path: Path) -> None:
    items = [service(f"s{i}", ip="10.96.0.300") for i in range(250)]
    (tmp_path / "big.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    (tmp_path / "web.yaml").write_text(text(service("web")))
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        assert state.services["web"] == 80
        assert len(state.complaints) == 101
        assert state.complaints[-1] == "file big.json: 150 more problems"


def test_complaints_about_objects_in_two_files_are_limited_and_counted(tmp_path: Path) -> None:
    items = [service(f"s{i}", ip=f"10.96.1.{i}") for i in range(1, 251)]
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        assert len(state.services) == 250
        assert len(state.complaints) == 101
        assert state.complaints[-1].endswith("150 more problems")


def test_bad_manifests_may_appear_at_run_time(tmp_path: Path) -> None:
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        expected = write(tmp_path)
        state.wait(good_ones_work)
        wait_past_everything(state, tmp_path)
        assert unexpected(state.complaints, expected) == ([], [])


# --- what a user sees of one hostile file, and that no other file has to suffer from it


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def device(kind: int, major: int, minor: int) -> Callable[[Path], object]:
    return lambda path: os.mknod(path, kind, os.makedev(major, minor))


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "is not a regular file"),
    "a character device": (device(stat.S_IFCHR, 1, 5), "is not a regular file"),
    "a block device": (device(stat.S_IFBLK, 7, 200), "is not a regular file"),
    "a link to a terminal": (lambda path: path.symlink_to("/dev/ptmx"), "is not a regular file"),
    "a socket": (bound, "is not a regular file"),
    "a directory": (os.mkdir, ""),
    "a link to a directory": (lambda path: path.symlink_to("."), ""),
    "a loop of links": (
        lambda path: path.symlink_to(path.name), "can't be read: Too many levels of symbolic links"),
    "no bytes": (content(b""), "is empty"),
    "spaces": (content(b" \n\t" * 1000), "is empty"),
    "NULs": (content(b"\0" * 1_000_000), "is not YAML: "),
    "invalid UTF-8": (content(b"kind: \xc3\x28\n"), "is not YAML: "),
    "a bomb of aliases": (content(b"a: &a [1,1,1,1,1,1,1,1,1]\n" + b"".join(
        b"%c: &%c [%s]\n" % (i + 1, i + 1, b",".join([b"*%c" % i] * 9)) for i in range(97, 110))),
        "is not YAML: aliases stand for more than 100000 nodes"),
    "deep nesting": (content(b"[" * 1_000_000), "is not YAML: nested too deeply"),
    "deep maps": (content(b"{a: " * 1_000_000), "is not YAML: nested too deeply"),
    "deep blocks": (
        content(b"".join(b" " * i + b"a:\n" for i in range(2000))), "is not YAML: nested too deeply"),
    "a million documents": (
        content(b"---\n" * 1_000_000), "more than 1000 documents or items are no API objects"),
    "a million comments": (content(b"# web\n" * 1_000_000), ""),
    "a huge key": (content(b"? " + b"k" * 8_000_000 + b"\n: v\n"), "kind: is missing"),
    "a huge value": (content(b"a: " + b"v" * 8_000_000 + b"\n"), "kind: is missing"),
    "a huge number": (content(b"a: " + b"9" * 8_000_000 + b"\n"), "kind: is missing"),
    "a tab": (content(b"kind:\n\tService\n"), "is not YAML: found character"),
    "more than 16 MiB": (content(b"#" * ((16 << 20) + 1)), "is larger than 16 MiB"),
    "a key twice": (
        content(text(service("twice", port=1)).replace('"port": 1', '"port": 1, "port": 2').encode()), ""),
}


@pytest.mark.parametrize(("make", "complaint"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_named_and_no_change_of_another_is_missed(
    tmp_path: Path, make: Callable[[Path], object], complaint: str
) -> None:
    path = tmp_path / "bad\nname.yaml"
    (tmp_path / "web.yaml").write_text(text(service("web")))
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        make(path)
        for port in (81, 82):
            (tmp_path / "web.yaml").write_text(text(service("web", port=port)))
            state.wait(lambda s, port=port: s.services["web"] == port)  # type: ignore[misc]
        if complaint:
            state.wait(lambda s: s.bad)
            assert complaint in state.complaints[0]
            assert "bad\\nname.yaml" in state.complaints[0]
            assert state.complaints[0].isprintable()
        elif make is HOSTILE["a key twice"][0]:
            state.wait(serving(web=82, twice=2))
        wait_past_everything(state, tmp_path)
        assert len(state.bad) == bool(complaint)
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        assert state.services["web"] == 82
        assert len(state.bad) == bool(complaint)


@pytest.mark.parametrize("content", ["[{},", "[1,", "[[],"], ids=["objects", "numbers", "lists"])
def test_a_list_of_a_million_items_is_refused_before_it_fills_the_memory(
    tmp_path: Path, content: str
) -> None:
    items = content[0] + content[1:] * 1_100_000 + content[1:-1] + "]"
    with followed(tmp_path) as state:
        state.wait(lambda s: s.store.complete)
        (tmp_path / "bad.json").write_text(f'{{"apiVersion": "v1", "kind": "List", "items": {items}}}')
        state.wait(lambda s: s.bad)
        assert state.complaints == ["file bad.json: has more than 1000000 values"]


def test_a_file_that_this_user_may_not_read(tmp_path: Path) -> None:
    for directory in (*tmp_path.parents, tmp_path):
        if directory.is_relative_to("/tmp") and directory != Path("/tmp"):
            directory.chmod(0o755)
    (tmp_path / "secret.yaml").write_text(text(service("secret")))
    (tmp_path / "secret.yaml").chmod(0o600)
    (tmp_path / "web.yaml").write_text(text(service("web", "10.96.0.77")))
    command = as_nobody(KPROXY, "render", "--mode=nftables", f"--manifests={tmp_path}")
    done = subprocess.run(
        [*command, "--hostname-override=node1"], capture_output=True, text=True, check=False)
    assert "not used: file secret.yaml: can't be read: Permission denied" in done.stderr
    assert "10.96.0.77" in done.stdout

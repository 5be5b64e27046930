"""Malformed and hostile manifests among good ones: the good ones work, each bad one is reported once."""

import json
from pathlib import Path

from tests.core.directory_rig import State, followed, service, text, wait_past_everything
from tests.core.kube.hostile_objects import GOOD_ENDPOINTS, write


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

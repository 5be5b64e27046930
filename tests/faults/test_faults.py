"""Every fault can still be planted, and has tests."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lanes
from tests.faults.__main__ import CHECKOUT, Unplantable, planted
from tests.faults.faults import FAULTS, Fault

ROOMS = ("kproxy_core", "plugins")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_planted_once_and_has_tests(fault: Fault) -> None:
    path, before, after = planted(fault, CHECKOUT)
    if path.suffix == ".py":
        compile(after, fault.file, "exec")
    assert after != before
    assert fault.verb in lanes.VERBS
    for test in fault.tests:
        file, _, name = test.partition("::")
        functions = ast.parse((CHECKOUT / file).read_text(encoding="utf-8")).body
        found = [each.name for each in functions if isinstance(each, ast.FunctionDef)]
        assert name.partition("[")[0] in found if name else found


def test_a_fault_whose_text_is_gone_or_there_twice_is_named(tmp_path: Path) -> None:
    fault = Fault("twice", "file.py", "one", "two", ())
    for text in ("other", "one one"):
        (tmp_path / "file.py").write_text(text)
        with pytest.raises(Unplantable, match=r"twice: file\.py"):
            planted(fault, tmp_path)


def test_every_room_and_plugin_has_a_fault() -> None:
    faulty = {fault.file for fault in FAULTS}
    assert [room for room in _rooms() if not any(file.startswith(f"{room}/") for file in faulty)] == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def _rooms() -> Iterator[str]:
    yield "conformance/kproxy_conformance"
    for parent in ROOMS:
        yield from (f"{parent}/{entry.name}" for entry in os.scandir(CHECKOUT / parent)
                    if (Path(entry) / "__init__.py").exists())

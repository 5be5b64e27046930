"""The lanes of each test, and the checks for guests, as JSON: ``python -m tests.rooms.selection``.

Everything is collected once; then pytest selects with the options of each lane.
"""

import sys
from argparse import ArgumentParser
from contextlib import redirect_stdout
from pathlib import Path

import msgspec
import pytest

from tests.lanes import CHECKOUT, GATE, TEST, Lane


class Selection:
    """A plugin of pytest that notes the lanes of each test."""

    def __init__(self) -> None:
        self.lanes: dict[str, list[str]] = {}
        self.checks: set[Path] = set()
        """Modules that tests have run in a guest."""
        self._is_selecting = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self._is_selecting:
            return
        self._is_selecting = True
        self.lanes = {item.nodeid: [] for item in items}
        for item in items:
            if isinstance(item, pytest.Function) and item.get_closest_marker("in_a_guest"):
                self.checks.update(getattr(item.module, "CHECKS", ()))
        for lane in (*TEST, *GATE):
            for item in [] if lane.is_program or lane.repeats else _selected(lane, session, config, items):
                self.lanes[item.nodeid].append(lane.name)
        items.clear()


def _selected(
    lane: Lane, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> list[pytest.Item]:
    parser = ArgumentParser()
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--ignore", type=Path, action="append", default=[])
    parser.add_argument("-k", dest="keyword", default="")
    parser.add_argument("-m", dest="markexpr", default="")
    parser.add_argument("--part", default="1/1")
    options = parser.parse_args(lane.arguments)
    for name in ("keyword", "markexpr", "part"):
        setattr(config.option, name, getattr(options, name))
    paths, ignored = ([CHECKOUT / path for path in chosen] for chosen in (options.paths, options.ignore))
    modules = {
        path for path in {item.path for item in items}
        if any(map(path.is_relative_to, paths)) and not any(map(path.is_relative_to, ignored))
    }  # fmt: skip
    chosen = [item for item in items if item.path in modules]
    config.hook.pytest_collection_modifyitems(session=session, config=config, items=chosen)
    return chosen


def main() -> int:
    selection = Selection()
    options = ["--collect-only", "-qq", "--assert=plain", "-p", "no:cacheprovider"]
    with redirect_stdout(sys.stderr):
        status = pytest.main([*options, str(CHECKOUT / "tests")], plugins=[selection])
    found = {"lanes": selection.lanes, "checks": sorted(map(str, selection.checks))}
    print(msgspec.json.encode(found).decode())
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else 1


if __name__ == "__main__":
    sys.exit(main())

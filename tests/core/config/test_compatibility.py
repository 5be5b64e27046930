"""docs/compatibility.md leaves nothing of kube-proxy out, and a test proves each of its rows."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from kproxy_core.config.check import FEATURE_GATES, NO_EFFECT
from kproxy_core.config.flags import FLAGS, OLDER
from tests.core.golden import golden

CHECKOUT = Path(__file__).parents[3]
PAGE = CHECKOUT / "docs" / "compatibility.md"
TESTS = yaml.safe_load(Path(__file__).with_name("compatibility.yaml").read_text(encoding="utf-8"))
"""By section and first cell of a row."""
STATES = {"works", "differs", "no effect", "not supported", "not sent"}


class Row(NamedTuple):
    """One line of a table."""

    section: str
    """The headline above."""
    names: tuple[str, ...]
    state: str
    how: str
    cell: str
    """The first one."""


def rows() -> list[Row]:
    found = []
    section = ""
    has_states = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if "state" in cells:
            has_states = True
        elif not cells:
            has_states = False
        elif has_states and len(cells) == 3:
            names = tuple(name.strip(" `") for name in cells[0].split(","))
            found.append(Row(section, names, cells[1], cells[2].strip(" |"), cells[0]))
    return found


def named(section: str) -> set[str]:
    return {name for row in rows() if row.section == section for name in row.names}


def test_every_flag_of_kube_proxy_has_a_row() -> None:
    lines = golden("flags.txt").read_text().splitlines()
    wanted = {flag for line in lines for flag in re.findall(r"(?<![\w-])--?[\w-]+", line)}
    assert wanted - named("Flags") == set()


def test_every_older_flag_has_a_row_and_there_are_no_others() -> None:
    ours = {f"--{flag.name}" for flag in FLAGS.values()} - {
        "--mode", "--manifests", "--dry-run", "--own-only", "--userspace-listen", "--mode-fallback",
        "--plugin", "--exclusive",
    }  # fmt: skip
    assert {f"--{flag.name}" for flag in OLDER} <= named("Flags")
    assert named("Flags") == ours | {"-h", "--help", "-v", "--proxy-mode"}


def leaves(value: object, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path


def test_every_field_of_kube_proxy_has_a_row() -> None:
    wanted = set(leaves(yaml.safe_load(golden("default-config.yaml").read_text())))
    assert wanted - named("Configuration") == set()


def test_every_feature_gate_has_a_row() -> None:
    assert set(FEATURE_GATES) <= named("Feature gates")


def test_every_metric_of_kube_proxy_has_a_row() -> None:
    texts = [golden(f"metrics-{mode}.txt").read_text() for mode in ("iptables", "nftables")]
    assert {line.split()[0] for text in texts for line in text.splitlines()} - named("Metrics") == set()


def test_the_page_lists_the_options_without_effect() -> None:
    said = {name for row in rows() if row.state == "no effect" for name in row.names}
    for path in NO_EFFECT:
        assert any(name == path or name.startswith(f"{path}.") for name in said), path
    assert {f"--{flag.name}" for flag in OLDER if flag.no_effect} <= said


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.names[0])
def test_a_row_has_a_known_state_a_reason_and_a_test_that_exists(row: Row) -> None:
    assert row.state in STATES
    assert row.how or row.state == "works", "a state other than works needs its reason"
    if row.state != "not sent":
        file, _, test = TESTS[row.section][row.cell].partition("::")
        texts = [path.read_text(encoding="utf-8") for path in (CHECKOUT / "tests").rglob(file)]
        assert any(f"\ndef {test}(" in text for text in texts), f"{file} has no {test}"


def test_no_test_is_listed_for_a_row_that_is_gone() -> None:
    said = {(row.section, row.cell) for row in rows()}
    assert {(section, cell) for section, cells in TESTS.items() for cell in cells or ()} <= said

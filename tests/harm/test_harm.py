"""While harm is done, changes of another Service take effect, and no connection of others fails."""

import re
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.guest.checks import Problems, names_of, play
from tests.harm.kinds import KINDS, MODES, ON_HOST, Kind, hostile
from tests.harm.room import BYSTANDER, CALM, TARGET, Client, peak_memory, room
from tests.patience import PATIENCE

MOST_MEMORY = 256 << 20
CHANGES = 3
"""At least; more until the harm is there."""
_LONGEST = 5 * PATIENCE
"""Seconds for what takes half a minute on a quiet machine: 100,000 ports."""
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


CHECKS = [Path(__file__).with_name("ipvs_checks.py")]


@pytest.mark.parametrize(
    ("kind", "mode"), [(kind, mode) for kind in KINDS for mode in ON_HOST if mode in kind.modes], ids=str)
def test_others_are_served(tmp_path: Path, kind: Kind, mode: str) -> None:
    check_others_are_served(tmp_path, kind, mode)


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("name", names_of(CHECKS))
def test_in_the_guest(name: str, from_guest: Problems) -> None:
    assert name in from_guest
    assert not any(from_guest[name]), "\n".join(from_guest[name])


def check_others_are_served(directory: Path, kind: Kind, mode: str) -> None:
    """Do harm of *kind* to a kproxy in *mode*, and see that others are served."""
    with ExitStack() as stack:
        made = stack.enter_context(room(directory, mode, own_tables=kind.own_tables, **kind.options))
        proxy = stack.enter_context(made.here.proxy(under=kind.under))
        made.await_answer(CALM)
        made.await_answer(BYSTANDER)
        client: Client | None = None
        if not kind.cuts_open:
            client = Client(made.network, CALM, TARGET, opens=not kind.cuts_new)
            stack.enter_context(closing(client))
            client.begun.wait(PATIENCE)
        with kind.begin(made, proxy):
            changes, began, is_told = 0, time.monotonic(), not kind.health
            while changes < CHANGES or not is_told or not kind.is_there(made):
                changes += 1
                made.change()
                # It may end before all changes have taken effect.
                is_told = is_told or bool(re.search(kind.health, proxy.health()[1]))
                assert time.monotonic() < began + _LONGEST, f"no such harm:\n{made.here.logged[-4000:]}"
            made.create()
            if client is not None:
                client.close()
                assert client.begun.is_set()
                assert not client.problems
        made.change()
        memory = peak_memory(proxy)
        assert memory < MOST_MEMORY, f"{memory >> 20} MiB"
        proxy.await_health()
        assert not re.search("CRITICAL|unexpected|bug: ", made.here.logged)


def test_a_start_without_inotify_says_what_it_needs_it_for(tmp_path: Path) -> None:
    with room(tmp_path, "userspace") as made:
        with pytest.raises(AssertionError, match=re.escape("(1, '')")):
            with made.here.proxy(under=hostile("refused", "inotify_init1")):
                pass
        last = made.here.logged.splitlines()[-1]
        assert "cannot watch the directory of manifests" in last
        assert "Traceback" not in made.here.logged


def test_the_page_names_every_kind_and_its_modes() -> None:
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## Harm\n")
    heading, *rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", section.partition("\n## ")[0], re.MULTILINE)
    assert heading == ("harm", "modes")
    assert rows == [(kind.name, _modes_of(kind)) for kind in KINDS]


def _modes_of(kind: Kind) -> str:
    others = [mode for mode in MODES if mode not in kind.modes]
    if len(others) > 1:
        return ", ".join(mode for mode in MODES if mode in kind.modes)
    return f"all but {others[0]}" if others else "all"

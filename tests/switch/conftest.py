"""The tour of the modes that this machine's kernel lacks takes minutes: all other tests go on beside it."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.guest.guest import Guest
from tests.switch.tour import COMMAND, CONNECTIONS, GUEST

GUEST_SECONDS = 1500
"""Its longest life. Alone on a processor of its own a tour takes four minutes."""
ON_A_SLOW_MACHINE = ("SWITCH_PATIENCE=240", "SWITCH_EACH_TICK=8")
"""So that it is not the machine that loses connections."""

_UNDER_WAY = pytest.StashKey[Guest]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the guest if a test asks for its tour."""
    if session.config.option.collectonly:
        return
    if not any("guest_on_tour" in getattr(item, "fixturenames", ()) for item in session.items):
        return
    stack = ExitStack()
    session.config.add_cleanup(stack.close)
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kproxy-tour-")))
    command = ["env", *ON_A_SLOW_MACHINE, *COMMAND, str(directory), str(CONNECTIONS), *GUEST]
    session.config.stash[_UNDER_WAY] = stack.enter_context(
        Guest(command, directory / "log", share=directory, seconds=GUEST_SECONDS)
    )


@pytest.fixture(scope="session")
def guest_on_tour(pytestconfig: pytest.Config) -> Guest:
    """The guest, which may still be on its way."""
    return pytestconfig.stash[_UNDER_WAY]

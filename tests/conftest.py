"""What holds for every test: no deadline on examples, and nothing left behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("kproxy", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("kproxy")


@pytest.fixture(scope="session", autouse=True)
def _no_namespace_is_left() -> Iterator[None]:
    """Tests name their network namespaces with the process id; at the end none may be left."""
    yield
    names = Path("/run/netns")
    left = [path.name for path in names.glob(f"*{os.getpid()}*")] if names.exists() else []
    assert not left, f"network namespaces left behind: {', '.join(left)}"

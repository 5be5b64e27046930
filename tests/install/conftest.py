"""The package for Debian, which is built once."""

from pathlib import Path

import pytest

from tests.install.packages import build


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("package"))

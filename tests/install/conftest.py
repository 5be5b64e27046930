"""A release and its files, which are made once."""

from pathlib import Path

import pytest

from tests.install.packages import Release, make_release


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return make_release(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="session")
def package(released: Release) -> Path:
    """The package for Debian."""
    (found,) = released.files.glob("*.deb")
    return found


@pytest.fixture(scope="session")
def wheel(released: Release) -> Path:
    (found,) = released.files.glob("kproxy-*.whl")
    return found

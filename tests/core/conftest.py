"""A bug that the core survives and logs must not go unseen in its tests."""

from collections.abc import Iterator

import pytest

from tests.kernels import nf_tables

__all__ = ["nf_tables"]


@pytest.fixture(autouse=True)
def _no_bugs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if a bug was logged. A test of such a bug takes the records with `caplog.clear`."""
    yield
    bugs = [record.getMessage() for when in ("setup", "call") for record in caplog.get_records(when)]
    assert not [text for text in bugs if text.startswith("bug: ")]

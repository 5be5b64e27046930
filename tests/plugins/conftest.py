"""A kernel of its own for every test that writes to nf_tables."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kproxy_conformance.network.namespaces import Namespace
from tests.kernels import nf_tables

__all__ = ["netns", "nf_tables"]


@pytest.fixture
def netns() -> Iterator[None]:
    """Move the test's thread, and the threads it starts, to a network namespace without links."""
    with closing(Namespace("netns")) as made, made.entered():
        yield

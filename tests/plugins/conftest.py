"""A kernel of its own for every test that writes to nf_tables."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kproxy_conformance.network.namespaces import Namespace
from kproxy_core.nft.fake import FakeKernel


@pytest.fixture
def netns() -> Iterator[None]:
    """Move the test's thread, and the threads it starts, to a network namespace without links."""
    with closing(Namespace("netns")) as made, made.entered():
        yield


@pytest.fixture(params=["fake", "linux"])
def nf_tables(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the test's sockets opened in a kernel in memory, or in a network namespace."""
    if request.param == "fake":
        with FakeKernel():
            yield
    else:
        with closing(Namespace("nf-tables")) as made, made.entered():
            yield

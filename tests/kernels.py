"""The kernels in which tests of nf_tables run that need no packets."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kproxy_conformance.network.namespaces import Namespace
from kproxy_core.nft.fake import FakeKernel


@pytest.fixture(params=["fake", "linux"])
def nf_tables(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the test's sockets opened in a kernel in memory, or in a network namespace."""
    if request.param == "fake":
        with FakeKernel():
            yield
    else:
        with closing(Namespace("nf-tables")) as made, made.entered():
            yield

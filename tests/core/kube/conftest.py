"""What several tests of the sources need."""

import logging
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from kproxy_core.kube import directory


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[SimpleQueue[str]]:
    """The messages of the sources, as they are logged."""
    messages: SimpleQueue[str] = SimpleQueue()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.put(record.getMessage())

    caplog.set_level(logging.INFO, "kproxy.sources")
    handler = Handler()
    directory.log.addHandler(handler)
    yield messages
    directory.log.removeHandler(handler)

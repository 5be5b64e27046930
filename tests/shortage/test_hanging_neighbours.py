"""Others that hang, or never read what they are sent: the change of a Service takes effect meanwhile."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from tests.shortage.node import MODES, node, vip


@pytest.mark.parametrize("mode", MODES)
def test_nobody_reads_the_log(tmp_path: Path, mode: str) -> None:
    pipe = tmp_path / "standard-error"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with node(tmp_path, mode) as here:
        here.serve(0)
        with here.proxy("-v4", under=["sh", "-c", f'exec "$@" 2>{pipe}', "sh"]) as proxy:
            filler = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            with suppress(BlockingIOError):
                while True:
                    os.write(filler, bytes(1))
            for number in range(1, 5):
                here.serve(number)
                here.await_answer(vip(number))
            assert proxy.end()[0] == 0
    os.close(filler)
    os.close(reader)

"""Programs of socket filters, assembled."""

import pytest

from kproxy_core.netlink.socket_filter import ACCEPT, DROP, Step, assemble, if_equal, load, unless_equal

pytestmark = pytest.mark.pure


def test_jumps_skip_the_steps_before_their_label() -> None:
    program = assemble(load(4, 12), if_equal(7, "drop"), unless_equal(8, "drop"), ACCEPT, "drop", DROP)
    assert program[:3] == ((0x20, 0, 0, 12), (0x15, 2, 0, 7), (0x15, 0, 1, 8))


@pytest.mark.parametrize("steps", [
    ("top", load(4, 0), if_equal(7, "top"), ACCEPT),
    (if_equal(7, "end"), *[load(4, 0)] * 256, "end", ACCEPT),
])
def test_a_jump_that_the_kernel_cannot_make_is_refused(steps: tuple[Step | str, ...]) -> None:
    with pytest.raises(ValueError, match="cannot jump to"):
        assemble(*steps)

"""A full connection tracking table. Its size belongs to the whole kernel, so these run in a guest."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.shortage.node import ENDPOINT, PORT, Node, node, vip

_MOST = Path("/proc/sys/net/netfilter/nf_conntrack_max")


@contextlib.contextmanager
def full_table(here: Node) -> Iterator[None]:
    """Fill the table with established connections, which the kernel does not drop early."""
    before = _MOST.read_text()
    _MOST.write_text("64")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            for _ in range(100):
                stack.enter_context(here.dial(ENDPOINT, PORT))
        yield
    _MOST.write_text(before)


def test_changes_are_programmed_and_served_once_the_table_has_room(tmp_path: Path) -> None:
    with node(tmp_path, "nftables") as here:
        here.serve(1)
        with here.proxy("-v", "2") as proxy:
            here.await_answer(vip(1))
            with full_table(here):
                assert not here.answers(vip(1))
                assert "table full, dropping packet" in here.network.run("dmesg")
                here.serve(2)
                here.await_log("synced.*service_ports=2")
            here.await_answer(vip(1))
            here.await_answer(vip(2))
            proxy.await_health()

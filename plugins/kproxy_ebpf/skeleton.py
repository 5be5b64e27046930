"""The rules that exempt marked packets from connection tracking. Pure."""

from kproxy_core.linux.nft_rules import (
    INPUT_INDEX,
    L4_PROTOCOL,
    META_MARK,
    NOTRACK,
    OUTPUT_INDEX,
    SOCKET_MARK,
    equals,
    loopback,
)
from kproxy_core.linux.nft_tables import Chain, Layout, Object, Place, Table
from kproxy_core.model.address import Family, Protocol
from kproxy_ebpf.names import NOTRACK_TABLE


def notrack_table(family: Family) -> Table:
    return Table(family, NOTRACK_TABLE)


def notrack_layout(mark: int) -> Layout:
    """Return the objects of the table.

    Replies have no mark: they are recognised by their socket's. Connections within the node are tracked,
    because neither holds for replies of a server of the node itself.
    """
    tcp = equals(L4_PROTOCOL, Protocol.TCP)
    chains: list[Object] = [
        Chain(hook, ((tcp, loopback(index, negate=True), equals(marked, mark), NOTRACK),),
              Place("filter", hook, -300))
        for hook, index, marked in (
            ("output", OUTPUT_INDEX, META_MARK), ("prerouting", INPUT_INDEX, SOCKET_MARK))
    ]  # fmt: skip
    return {chain.name: chain for chain in chains}

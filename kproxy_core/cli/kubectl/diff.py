"""``kubectl kproxy diff``: every node's kernel compared with its plans."""

from typing import TYPE_CHECKING, Any

import click

from kproxy_core.cli.diff import DIFFERENT, SAME
from kproxy_core.cli.kubectl.options import NODES, with_cluster
from kproxy_core.cli.kubectl.tables import Row, gathered, show_table, show_unreached
from kproxy_core.cli.options import OUTPUT, FlagCommand
from kproxy_core.cli.terminal import encoded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kproxy_core.fleet.cluster import Cluster
    from kproxy_core.fleet.summary import Shared

ASKED = ("kproxy", "diff", "-o", "json")
_TIMEOUT = 120.0
"""Seconds: 10,000 Services are compared in a few."""


def document(shared: "Sequence[Shared]", unreached: "Mapping[str, str]", nodes: int) -> dict[str, Any]:
    import msgspec

    return {
        "nodes": nodes, "unreached": unreached,
        "differences": [{**msgspec.to_builtins(each.difference), "nodes": each.nodes} for each in shared],
    }  # fmt: skip


def show(shared: "Sequence[Shared]", unreached: "Mapping[str, str]", nodes: int) -> None:
    from kproxy_core.fleet.summary import named

    show_unreached(unreached)
    if shared:
        show_table(("NODES", "ON", "FRONTEND", "SERVICE PORT", "DIFFERENCE"), [
            Row((str(len(each.nodes)), named(each.nodes), each.difference.frontend,
                 each.difference.service_port, each.difference.difference), is_odd=True)
            for each in shared])
    differing = {node for each in shared for node in each.nodes}
    click.echo(f"{nodes - len(differing)} of {nodes + len(unreached)} nodes do what their plans say")


@click.command("diff", cls=FlagCommand)
@NODES
@with_cluster
@OUTPUT
def command(cluster: "Cluster", nodes: str, output: str) -> int:
    """Compare what each node's kernel does with packets to what it should do.

    A difference that several nodes have is listed once; those of the fewest nodes come first. Nothing is
    written. Exit status: 0 if all nodes agree with their plans, 1 if one differs or does not answer, or that
    is unclear.
    """
    from kproxy_core.fleet.answers import Diff
    from kproxy_core.fleet.summary import shared_differences

    found, unreached = gathered(cluster, nodes, ASKED, Diff, timeout=_TIMEOUT)
    shared = shared_differences(found)
    if output != "text":
        click.echo(encoded(document(shared, unreached, len(found)), output))
    else:
        show(shared, unreached, len(found))
    return DIFFERENT if unreached or shared else SAME

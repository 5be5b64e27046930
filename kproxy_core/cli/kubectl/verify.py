"""``kubectl kproxy verify --traffic``: connections from every node to every frontend."""

from collections import Counter
from typing import TYPE_CHECKING

import click

from kproxy_core.cli.diff import DIFFERENT, SAME
from kproxy_core.cli.kubectl.options import NODES, with_cluster
from kproxy_core.cli.kubectl.tables import Row, gathered, show_table, show_unreached
from kproxy_core.cli.options import OUTPUT, FlagCommand
from kproxy_core.cli.terminal import encoded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kproxy_core.fleet.answers import Verified
    from kproxy_core.fleet.cluster import Cluster
    from kproxy_core.fleet.summary import Failing

_COLUMNS = 8
"""Nodes in the matrix: those with the most failures."""


def matrix(failing: "Sequence[Failing]") -> "Iterator[Sequence[str]]":
    """Yield rows of cells: frontends by nodes, with the totals of both. An ``x`` is a failure."""
    totals = Counter(node for each in failing for node in each.problems)
    nodes = sorted(totals, key=lambda node: (-totals[node], node))
    shown, others = nodes[:_COLUMNS], nodes[_COLUMNS:]
    yield ("FRONTEND", "SERVICE PORT", *shown, *[f"{len(others)} OTHERS"] * bool(others), "TOTAL")
    for each in failing:
        rest = sum(node in each.problems for node in others)
        yield (each.frontend, each.service_port, *("x" if node in each.problems else "." for node in shown),
               *[str(rest)] * bool(others), str(len(each.problems)))
    yield ("TOTAL", "", *(str(totals[node]) for node in shown),
           *[str(sum(totals[node] for node in others))] * bool(others), str(totals.total()))


def show(
    found: "Mapping[str, Verified]", failing: "Sequence[Failing]", unreached: "Mapping[str, str]"
) -> None:
    from kproxy_core.fleet.summary import named

    show_unreached(unreached)
    if failing:
        head, *rows = matrix(failing)
        show_table(head, [Row(cells, is_odd=True) for cells in rows])
        click.echo()
        for each in failing:
            by_problem: dict[str, list[str]] = {}
            for node, problems in each.problems.items():
                for problem in problems:
                    by_problem.setdefault(problem, []).append(node)
            for problem, nodes in by_problem.items():
                click.echo(f"{each.frontend} from {named(nodes)}: {problem}")
    tried = sum(len(verified.frontends) for verified in found.values())
    failed = sum(len(each.problems) for each in failing)
    click.echo(f"{tried - failed} of {tried} pairs of node and frontend do what the plans say, "
               "from the node itself: not tried from pods and from outside")


@click.command("verify", cls=FlagCommand)
@click.argument("to", metavar="[TO]", default="")
@click.option("--traffic", is_flag=True, help="Required: open connections. `kubectl kproxy diff` opens none.")
@click.option("--service", metavar="TO", default="", hidden=True, help="As TO.")
@click.option("--rate", metavar="N", type=click.FloatRange(0.1, 10_000), default=50, show_default=True,
              help="Connections per second from each node.")
@click.option("--connections", metavar="N", type=click.IntRange(1), default=10, show_default=True,
              help="Maximum number of connections from a node to one frontend.")
@click.option("--at-a-time", metavar="N", type=click.IntRange(1), default=10, show_default=True,
              help="Nodes that open connections at the same time.")
@click.option("--timeout", metavar="SECONDS", type=click.FloatRange(1), default=600, show_default=True,
              help="Limit for each node.")
@NODES
@with_cluster
@OUTPUT
def command(
    cluster: "Cluster", to: str, traffic: bool, service: str, rate: float, connections: int, at_a_time: int,
    timeout: float, nodes: str, output: str,
) -> int:
    """Connect from every node to every Service by TCP.

    With TO, [NAMESPACE/]SERVICE[:PORT], only to that one. The connections are closed at once: no data is
    sent. Failures are shown as a matrix; frontends that fail from the fewest nodes come first. Exit status: 0
    if all connections do what the plans say, 1 if some do not, or a node does not answer.
    """
    if not traffic:
        raise click.UsageError(
            "--traffic is required: it opens connections; `kubectl kproxy diff` needs none")
    from kproxy_core.fleet.answers import Verified
    from kproxy_core.fleet.summary import failing_frontends

    asked = ("kproxy", "verify", "--traffic", f"--service={to or service}", f"--rate={rate}",
             f"--connections={connections}", "-o", "json")
    found, unreached = gathered(cluster, nodes, asked, Verified, at_a_time=at_a_time, timeout=timeout)
    failing = failing_frontends(found)
    if output != "text":
        click.echo(encoded({
            "nodes": len(found), "unreached": unreached,
            "failures": [{"frontend": each.frontend, "service_port": each.service_port,
                          "nodes": each.problems} for each in failing]}, output))
    else:
        show(found, failing, unreached)
    return DIFFERENT if failing or unreached else SAME

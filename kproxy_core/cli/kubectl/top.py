"""``kubectl kproxy top``: the traffic of Services, summed over nodes."""

from typing import TYPE_CHECKING

import click

from kproxy_core.app.requests import MOST_SERVICE_PORTS
from kproxy_core.cli.kubectl.options import NODES, with_cluster
from kproxy_core.cli.kubectl.tables import Row, gathered, show_table, show_unreached
from kproxy_core.cli.options import OUTPUT, FlagCommand
from kproxy_core.cli.terminal import encoded
from kproxy_core.cli.top import volume

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kproxy_core.fleet.answers import Top
    from kproxy_core.fleet.cluster import Cluster
    from kproxy_core.fleet.summary import Total

_HEADERS = ("SERVICE PORT", "PROTOCOL", "ENDPOINTS", "PER SECOND", "CONNECTIONS", "REJECTED", "FAILED",
            "BYTES", "PROBLEMS")


def row(total: "Total", nodes: int) -> Row:
    from kproxy_core.fleet.summary import named

    problems = "; ".join(problem if len(where) == nodes else f"{problem} (on {named(where)})"
                         for problem, where in total.problems.items())
    return Row(
        (total.service_port, total.protocol, str(total.endpoints), f"{total.rate:.1f}", str(total.forwarded),
         str(total.rejected), str(total.failed), volume(total.bytes), problems),
        is_odd=bool(total.rejected or total.failed or problems))


def show(
    totals: "Sequence[Total]", found: "Mapping[str, Top]", unreached: "Mapping[str, str]", count: int
) -> None:
    from kproxy_core.fleet.summary import named

    show_unreached(unreached)
    show_table(_HEADERS, [row(total, len(found)) for total in totals[:count]])
    silent = [node for node, top in found.items() if not top.counted]
    if silent:
        click.echo(f"connections are not counted on {named(silent)}: set kproxy.trafficMetrics")
    cut = [node for node, top in found.items() if top.found > len(top.services)]
    if cut:
        click.echo(f"only the first {MOST_SERVICE_PORTS} service ports of {named(cut)}: use --filter")


@click.command("top", cls=FlagCommand)
@click.option("--filter", "search", metavar="WORDS", default="",
              help="Only service ports whose names contain these words.")
@click.option("--count", metavar="N", type=click.IntRange(1), default=50, show_default=True,
              help="Maximum number of service ports that are printed.")
@NODES
@with_cluster
@OUTPUT
def command(cluster: "Cluster", search: str, count: int, nodes: str, output: str) -> int:
    """Show the traffic of each Service, summed over the nodes.

    Those with the most connections per second come first. Exit status: 1 if a node does not answer, else 0.
    """
    import msgspec

    from kproxy_core.fleet.answers import Top
    from kproxy_core.fleet.summary import total_traffic

    asked = ("kproxy", "top", "--once", "--sort=rate", f"--filter={search}", f"--count={MOST_SERVICE_PORTS}",
             "-o", "json")
    found, unreached = gathered(cluster, nodes, asked, Top)
    totals = total_traffic(found)
    if output != "text":
        click.echo(encoded({"nodes": len(found), "unreached": unreached,
                            "services": msgspec.to_builtins(totals[:count])}, output))
    else:
        show(totals, found, unreached, count)
    return 1 if unreached else 0

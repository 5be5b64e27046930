"""``kubectl kproxy status``: every node, those with problems first."""

from typing import TYPE_CHECKING, Any

import click

from kproxy_core.cli.kubectl.options import NODES, with_cluster
from kproxy_core.cli.kubectl.tables import Row, asked, selected, show_table
from kproxy_core.cli.options import OUTPUT, FlagCommand
from kproxy_core.cli.status import age
from kproxy_core.cli.terminal import encoded
from kproxy_core.config.release import described

if TYPE_CHECKING:
    from kproxy_core.app.replies import ProxyStatus
    from kproxy_core.fleet.cluster import Cluster, Node
    from kproxy_core.fleet.errors import Unreached

ASKED = ("kproxy", "status", "-o", "json")
_TIMEOUT = 15.0
"""Seconds: nodes that hang must not keep those of a large cluster waiting."""

HEADERS = ("NODE", "STATE", "FOR", "MODE", "VERSION", "LAST SYNC", "LAG", "FOREIGN CHANGES", "DOCTOR",
           "PROBLEMS")


def read(cluster: "Cluster", selector: str) -> "list[tuple[Node, ProxyStatus | Unreached]]":
    """Return the status of each node, those with problems first. Raises as `fleet_errors` expects."""
    from kproxy_core.app.replies import ProxyStatus

    found = list(asked(cluster, selected(cluster, selector), ASKED, ProxyStatus, timeout=_TIMEOUT))
    return sorted(found, key=lambda each: (is_well(each[1]), each[0].name))


def is_well(found: "ProxyStatus | Unreached") -> bool:
    return not isinstance(found, Exception) and found.well


def document(node: "Node", found: "ProxyStatus | Unreached") -> dict[str, Any]:
    from kproxy_core.app.replies import replied

    if isinstance(found, Exception):
        return {"node": node.name, "ready": node.ready, "well": False, "problems": [found.why]}
    return {**replied(found), "node": node.name, "ready": node.ready}


def row(node: "Node", found: "ProxyStatus | Unreached") -> Row:
    if isinstance(found, Exception):
        state = "not reached" if node.pod else "no kproxy"
        why = found.why if node.ready else f"the node is not Ready; {found.why}"
        return Row((node.name, state, *[""] * 7, why), is_odd=True)
    last = "never" if found.last_sync is None else f"{age(found.now - found.last_sync)} ago"
    count = len(found.findings)
    doctor = f"{count} finding{'s' * (count > 1)}" if count else ""
    version = described(found.version, found.commit)
    mode = found.mode
    if found.label:
        mode = f"{mode}, by label"
    elif found.configured not in ("", mode):
        mode = f"{mode}, not {found.configured}"
    return Row(
        (node.name, "well" if found.well else "not well", age(found.now - found.since), mode, version,
         last, age(found.lag) if found.lag else "", str(found.foreign_changes), doctor,
         "; ".join(found.problems)), is_odd=not found.well)


@click.command("status", cls=FlagCommand)
@NODES
@with_cluster
@OUTPUT
def command(cluster: "Cluster", nodes: str, output: str) -> int:
    """Say which nodes' proxies are well.

    Nodes with problems come first: those without a kproxy pod, those that do not answer, and those whose
    proxy is not well. Exit status: 1 if there is any, else 0.
    """
    found = read(cluster, nodes)
    well = sum(is_well(status) for _, status in found)
    if output != "text":
        documents = [document(node, status) for node, status in found]
        click.echo(encoded({"nodes": documents, "well": well}, output))
    else:
        show_table(HEADERS, [row(node, status) for node, status in found])
        click.echo(f"{well} of {len(found)} nodes are well")
    return 0 if well == len(found) else 1

"""Questions to many nodes with a progress bar, and tables: styled on a terminal, aligned text elsewhere."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from kproxy_core.cli.kubectl.options import require
from kproxy_core.cli.terminal import is_terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    from kproxy_core.fleet.cluster import Cluster, Node
    from kproxy_core.fleet.errors import Unreached

T = TypeVar("T")

_LONGEST = 500
"""Characters of a cell: a node may answer anything."""


def selected(cluster: "Cluster", selector: str) -> "list[Node]":
    """Return the nodes that *selector* means. Raises ClickException if there are none."""
    nodes = cluster.nodes(selector)
    if not nodes:
        raise click.ClickException(f"no node has the labels {selector}" if selector else "there are no nodes")
    return nodes


def gathered(
    cluster: "Cluster", selector: str, command: Sequence[str], kind: type[T], **limits: Any,
) -> tuple[dict[str, T], dict[str, str]]:
    """Return the answers of all nodes that *selector* means, by name, and why others did not answer.

    *limits*: see `Cluster.ask_all`. Raises as `fleet_errors` expects.
    """
    from kproxy_core.fleet.errors import Unreached

    found: dict[str, T] = {}
    unreached: dict[str, str] = {}
    for node, answer in asked(cluster, selected(cluster, selector), command, kind, **limits):
        if isinstance(answer, Unreached):
            unreached[node.name] = answer.why
        else:
            found[node.name] = answer
    return dict(sorted(found.items())), dict(sorted(unreached.items()))


def asked(
    cluster: "Cluster", nodes: "Sequence[Node]", command: Sequence[str], kind: type[T], **limits: Any,
) -> "Iterator[tuple[Node, T | Unreached]]":
    """Run *command* on *nodes*, and yield each with its answer. Shows the progress on a terminal.

    *limits*: see `Cluster.ask_all`.
    """
    from kproxy_core.fleet.answers import decode
    from kproxy_core.fleet.errors import Unreached

    with progress_bar(command[1]) as progress:
        for node, reply in cluster.ask_all(nodes, command, progress=progress, **limits):
            if isinstance(reply, Unreached):
                yield node, reply
                continue
            try:
                yield node, decode(node, reply, kind)
            except Unreached as error:
                yield node, error


@contextmanager
def progress_bar(what: str) -> "Iterator[Callable[[int, int], None]]":
    """Yield a function that shows how many nodes of all have been asked *what*, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    require("top", "rich")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("nodes")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class Row(NamedTuple):
    cells: Sequence[str]
    is_odd: bool = False
    """It needs attention."""


def show_unreached(unreached: Mapping[str, str]) -> None:
    """Print the nodes that did not answer, with the reason of each."""
    if unreached:
        show_table(("NODE", "NO ANSWER"), [Row(each, is_odd=True) for each in unreached.items()])
        click.echo()


def show_table(headers: Sequence[str], rows: Sequence[Row]) -> None:
    """Print *rows*, with the first `_LONGEST` characters of each cell."""
    rows = [Row([_shortened(cell) for cell in row.cells], row.is_odd) for row in rows]
    if not is_terminal():
        for line in aligned([headers, *(row.cells for row in rows)]):
            click.echo(line)
        return
    require("top", "rich")
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row.cells), style="red" if row.is_odd else "")
    console = Console(no_color=bool(os.environ.get("NO_COLOR")))
    with console.capture() as printed:
        console.print(table)
    click.echo(printed.get(), nl=False)


def _shortened(cell: str) -> str:
    return cell if len(cell) <= _LONGEST else f"{cell[:_LONGEST]}..."


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line for each row, with its cells, which may be styled, below each other."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _width(cell: str) -> int:
    """Return the number of characters of a cell without its styles."""
    return len(click.unstyle(cell))

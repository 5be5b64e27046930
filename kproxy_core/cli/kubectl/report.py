"""``kubectl kproxy report``: the archive of each node, in one place."""

import io
import re
import tarfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kproxy_core.cli.kubectl.options import NODES, with_cluster
from kproxy_core.cli.kubectl.tables import progress_bar, selected, show_unreached
from kproxy_core.cli.options import OUTPUT, FlagCommand
from kproxy_core.cli.report import create
from kproxy_core.cli.terminal import encoded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kproxy_core.fleet.cluster import Cluster, Node

ASKED = ("kproxy", "report", "-")
_TIMEOUT = 120.0
_AT_A_TIME = 8
"""Archives may be large, and each is held in memory."""
_LONGEST = 128 << 20
_GZIP = b"\x1f\x8b"
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
"""A node's name, which becomes the name of a file."""

Add = Callable[[str, bytes], None]


@contextmanager
def opened(place: str) -> "Iterator[Add]":
    """Yield a function that adds a file to *place*: a new tar if it ends so, else a new directory."""
    if not place.endswith(".tar"):
        directory = Path(place)
        directory.mkdir(mode=0o700)

        def write(name: str, data: bytes) -> None:
            (directory / name).write_bytes(data)

        yield write
        return
    with create(place) as file, tarfile.open(fileobj=file, mode="w") as archive:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(f"{Path(place).stem}/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(data))

        yield add


def collect(cluster: "Cluster", nodes: "Sequence[Node]", add: Add) -> tuple[list[str], dict[str, str]]:
    """Add each node's archive. Return the names of the nodes, and why others have none. Raises OSError."""
    from kproxy_core.fleet.errors import Unreached

    names: list[str] = []
    unreached: dict[str, str] = {}
    with progress_bar("report") as progress:
        for node, reply in cluster.ask_all(nodes, ASKED, _AT_A_TIME, _TIMEOUT, progress, _LONGEST):
            if isinstance(reply, Unreached):
                unreached[node.name] = reply.why
            elif not reply.stdout.startswith(_GZIP) or not _NAME.fullmatch(node.name):
                unreached[node.name] = reply.stderr or "its answer is no archive"
            else:
                add(f"{node.name}.tar.gz", reply.stdout)
                names.append(node.name)
    unreached = dict(sorted(unreached.items()))
    if unreached:
        add("problems.txt", "".join(f"{node}: {why}\n" for node, why in unreached.items()).encode())
    return names, unreached


@click.command("report", cls=FlagCommand)
@click.argument("place", metavar="[FILE.tar|DIRECTORY]", default="")
@NODES
@with_cluster
@OUTPUT
def command(cluster: "Cluster", place: str, nodes: str, output: str) -> int:
    """Collect the archives for a bug report.

    Each node's is the one that `kproxy report` writes there, and `kproxy explain --report` answers from it.
    By default they are written to a new tar file. Exit status: 1 if a node has none, else 0.
    """
    chosen = selected(cluster, nodes)
    place = place or time.strftime("kproxy-reports-%Y%m%dT%H%M%SZ.tar", time.gmtime())
    try:
        with opened(place) as add:
            names, unreached = collect(cluster, chosen, add)
    except OSError as error:
        raise click.ClickException(f"{place}: {error.strerror}") from error
    if output != "text":
        click.echo(encoded({"file": place, "nodes": sorted(names), "unreached": unreached}, output))
    else:
        show_unreached(unreached)
        click.echo(f"{place}: {len(names)} of {len(names) + len(unreached)} nodes")
    return 1 if unreached else 0

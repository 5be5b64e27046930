"""``kproxy top``: the traffic of Services, live in the terminal."""

import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from kproxy_core.app.control import send_request
from kproxy_core.app.requests import MOST_SERVICE_PORTS, Top, parse_texts
from kproxy_core.cli.options import OUTPUT, FlagCommand
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.terminal import encoded, is_terminal
from kproxy_core.linux import packages

if TYPE_CHECKING:
    from rich.table import Table

SORTS = ("rate", "connections", "rejected", "failed", "bytes", "name")
_WIDE = 110
"""Columns that a terminal must have to show frontends."""
_WIDTH_OF_FILES = 160
_KEYS = "q quit   s order   / filter   space pause   e endpoints"


def once(sort: str, search: str, count: int, output: str) -> None:
    """Print the traffic once. Raises RequestRefused or NoProxy."""
    found = _ask(sort, search, count)
    if output != "text":
        click.echo(encoded(found, output))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)
    with console.capture() as printed:  # rich alone would exit with 1 for a closed pipe
        console.print(_table(found, View(sort, search, endpoints=True), console.width, keys=""))
    click.echo(printed.get(), nl=False)


def _ask(sort: str, search: str, count: int) -> Mapping[str, Any]:
    return send_request(parse_texts(
        Top, {"search": search, "sort": sort, "count": str(min(count, MOST_SERVICE_PORTS))}))


@dataclass
class View:
    """The settings that keys change."""

    sort: str
    search: str
    endpoints: bool = False
    paused: bool = False
    typing: bool = False

    def press(self, key: str) -> bool:
        """Handle a key. Return False if it quits."""
        if self.typing:
            if key in "\r\n\x1b":
                self.typing = False
            elif key in "\x7f\b":
                self.search = self.search[:-1]
            elif key.isprintable():
                self.search += key
            return True
        match key:
            case "q" | "\x03" | "\x04":
                return False
            case "s":
                self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            case "/":
                self.typing, self.search = True, ""
            case " ":
                self.paused = not self.paused
            case "e":
                self.endpoints = not self.endpoints
        return True


def watch(sort: str, search: str, seconds: float) -> None:
    """Show traffic until a key quits. Refresh it every *seconds*. Raises RequestRefused or NoProxy."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    view = View(sort, search)
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        found: Mapping[str, Any] = {}
        due = 0.0
        while True:
            now = time.monotonic()
            if now >= due and not (view.paused and found):
                found, due = _ask(view.sort, view.search, console.height), now + seconds
            live.update(_table(found, view, console.width), refresh=True)
            patience = None if view.paused else max(0.0, due - time.monotonic())
            if not select.select([sys.stdin], [], [], patience)[0]:
                continue
            if not view.press(sys.stdin.read(1)):
                return
            due = 0.0


@contextmanager
def _single_keys() -> Iterator[None]:
    """Deliver each key at once, not only whole lines."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _table(found: Mapping[str, Any], view: View, width: int, keys: str = _KEYS) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    status = found["status"]
    health = "[green]well[/]" if status["well"] else "[bold red]not well[/]"
    matching = f"{found['found']} of {found['all']} service ports"
    title = f"{escape(status['node'])}  {escape(status['mode'])}  {health}  {matching}"
    problems = [f"[red]{escape(problem)}[/]" for problem in status["problems"]]
    if not found["counted"]:
        problems.append("[yellow]connections are not counted: set kproxy.trafficMetrics[/]")
    order = f"order: {view.sort}"
    if view.search or view.typing:
        order += f"   filter: {escape(view.search)}"
    table = Table(
        title="\n".join([title, *problems]),
        caption=f"{order}{'   paused' if view.paused else ''}\n{keys}".rstrip(), expand=True,
        title_justify="left", caption_justify="left", box=None, header_style="bold",
    )  # fmt: skip
    table.add_column("service port", overflow="fold", min_width=24, ratio=3)
    wide = width >= _WIDE
    if wide:
        table.add_column("frontends", overflow="fold", ratio=2)
    for name in ("endpoints", "per second", "connections", "rejected", "failed", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["services"]:
        problem = "".join(f" [red]{escape(text)}[/]" for text in row["problems"])
        more = len(row["frontends"]) - 1
        frontends = " ".join([*row["frontends"][:1], *[f"+{more}"] * (more > 0)])
        table.add_row(
            f"{escape(row['service_port'])} [dim]{row['protocol']}[/]{problem}", *[escape(frontends)] * wide,
            str(row["endpoint_count"]), f"{row['rate']:.1f}", str(row["forwarded"]),
            *(f"[red]{row[name]}[/]" if row[name] else "0" for name in ("rejected", "failed")),
            volume(_bytes(row)))
        for endpoint in row["endpoints"] if view.endpoints else ():
            remark = endpoint.get("quarantine") or ("" if endpoint["usable"] else "no longer usable")
            name = f"  {escape(endpoint['endpoint'])}{remark and f' [yellow]({escape(remark)})[/]'}"
            failed = sum(endpoint[failure] for failure in ("refused", "unanswered", "reset"))
            table.add_row(name, *[""] * (2 + wide), str(endpoint["forwarded"]), "", str(failed),
                          volume(_bytes(endpoint)))
    return table


def _bytes(row: Mapping[str, Any]) -> int:
    """Return the bytes of both directions."""
    number: int = row["bytes_to_endpoint"] + row["bytes_from_endpoint"]
    return number


def volume(number: float) -> str:
    """Return bytes such as ``1.5 MB``; "-" for 0, also if bytes are not counted."""
    if not number:
        return "-"
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while number >= 1000 and unit != "TB":
        number, unit = number / 1000, next(units)
    return f"{float(f'{number:.3g}'):g} {unit}"


@click.command("top", cls=FlagCommand)
@click.option("--once", "only_once", is_flag=True, help="Print once and exit, also on a terminal.")
@click.option("--sort", type=click.Choice(SORTS), default="rate", show_default=True,
              help="Column to sort by.")
@click.option("--filter", "search", metavar="WORDS", default="",
              help="Only service ports whose names contain these words.")
@click.option("--count", metavar="N", type=click.IntRange(1), default=50, show_default=True,
              help="Maximum number of service ports that --once prints.")
@click.option("--interval", metavar="SECONDS", type=click.FloatRange(0.5, 3600), default=2, show_default=True,
              help="Interval between refreshes.")
@OUTPUT
def command(only_once: bool, sort: str, search: str, count: int, interval: float, output: str) -> None:
    """Show the traffic of each Service, live.

    The running proxy counts connections if its configuration has kproxy.trafficMetrics: service or endpoint.
    """
    if output == "text" and (problem := packages.lacking("top", "rich")):
        raise click.ClickException(f"kproxy top {problem}; --output=json needs no other package")
    with cli_errors():
        if only_once or output != "text" or not is_terminal():
            once(sort, search, count, output)
        else:
            watch(sort, search, interval)

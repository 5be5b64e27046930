"""``kproxy switch``: another mode for the running proxy."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from kproxy_core.app.control import send_request
from kproxy_core.app.requests import Compare, Switch
from kproxy_core.cli.options import OUTPUT, FlagCommand, complete_mode
from kproxy_core.cli.plan import kernel_lines
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.terminal import bad, encoded, encoded_event, faint, good, is_terminal, show


def check(mode: str, output: str) -> bool:
    """Print what would change with *mode*. Return True if no Service would lose anything.

    Raises RequestRefused or NoProxy.
    """
    found = send_request(Compare(mode=mode))
    if output != "text":
        click.echo(encoded(found, output))
        return not found["loses"]
    now = found["mode"]
    if now == mode:
        show(f"{mode} already serves")
        return True
    if not found["appearing"] and not found["disappearing"]:
        show(f"nothing changes for this node's Services between {now} and {mode}")
    for line in kernel_lines(mode, found["kernel"]):
        show(line)
    for caveat in found["appearing"]:
        show(f"{bad('lost') if caveat['lost'] else 'differs'}: {_described(caveat)}")
    for caveat in found["disappearing"]:
        show(f"{bad('lost') if caveat['only_here'] else 'gone'} with {now}: {_described(caveat)}")
    return not found["loses"]


def switch(mode: str, output: str) -> None:
    """Switch the running proxy to *mode*, and print each step. Raises RequestRefused or NoProxy."""
    done = send_request(Switch(mode=mode), _step_printer(output))
    if output != "text":
        click.echo(encoded_event(done, output))
    elif done["configured"] != mode and not done.get("label"):
        named = f"mode {done['configured']!r}" if done["configured"] else "no mode"
        show(f"the configuration has {named}: set {mode!r} to keep it after a reboot")


def _step_printer(output: str) -> Callable[[str], None]:
    """Return a function that prints a step: an event, plain text, or with the time on a terminal."""
    began = time.monotonic()

    def print_step(line: str) -> None:
        if output != "text":
            click.echo(encoded_event({"step": line}, output))
        elif is_terminal():
            text = bad(line) if line.startswith("rolling back") else line
            show(f"{faint(f'{time.monotonic() - began:5.1f} s')} {good('*')} {text}")
        else:
            click.echo(line)

    return print_step


def _described(caveat: Mapping[str, Any]) -> str:
    return f"{caveat['service_port']}: {caveat['what']}" if caveat["service_port"] else str(caveat["what"])


@click.command("switch", cls=FlagCommand)
@click.argument("mode", shell_complete=complete_mode)
@click.option("--check", "only_check", is_flag=True,
              help="Only show what would change for this node's Services.")
@OUTPUT
def command(mode: str, only_check: bool, output: str) -> None:
    """Switch the running proxy to another mode; connections stay open.

    Exit status of --check: 0 if MODE would serve everything that is served now, else 1.
    """
    with cli_errors():
        if not only_check:
            switch(mode, output)
        elif not check(mode, output):
            raise click.ClickException(f"not everything would be served with {mode}")

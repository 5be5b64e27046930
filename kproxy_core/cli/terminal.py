"""Text for people: styled on a terminal, plain elsewhere or with NO_COLOR (https://no-color.org) set."""

import os
import sys

import click


def is_terminal() -> bool:
    """Return whether a person reads the standard output."""
    return sys.stdout.isatty()


def show(text: str) -> None:
    """Print *text*; its styles only where they are welcome."""
    click.echo(text, color=False if os.environ.get("NO_COLOR") else None)


def good(text: str) -> str:
    return click.style(text, fg="green")


def bad(text: str) -> str:
    return click.style(text, fg="red", bold=True)


def hint(text: str) -> str:
    return click.style(text, fg="yellow")


def faint(text: str) -> str:
    return click.style(text, dim=True)


def strong(text: str) -> str:
    return click.style(text, bold=True)

"""Text for people: styled on a terminal, plain elsewhere or with NO_COLOR (https://no-color.org) set."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click


def is_terminal() -> bool:
    """Return whether a person reads the standard output, on a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def show(text: str) -> None:
    """Print *text*; its styles only where they are welcome."""
    click.echo(text, color=is_terminal() and not os.environ.get("NO_COLOR"))


def show_answer(answer: Any, output: str, as_text: Callable[[Any], str]) -> None:
    """Print *answer* as *output*: json, or the text that *as_text* makes of it."""
    show(json.dumps(answer, indent=2) if output == "json" else as_text(answer))


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

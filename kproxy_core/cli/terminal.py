"""Text for people: styled on a terminal, plain elsewhere or with NO_COLOR (https://no-color.org) set."""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click


def is_terminal() -> bool:
    """Return whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def show(text: str) -> None:
    """Print *text*, with its styles only on a terminal and without NO_COLOR."""
    click.echo(text, color=is_terminal() and not os.environ.get("NO_COLOR"))


def show_answer(answer: Any, output: str, as_text: Callable[[Any], str]) -> None:
    """Print *answer* as JSON if *output* is json, else as the text that *as_text* returns."""
    show(formatted_answer(answer, output, as_text))


def formatted_answer(answer: Any, output: str, as_text: Callable[[Any], str]) -> str:
    import json

    return json.dumps(answer, indent=2) if output == "json" else as_text(answer)


good = partial(click.style, fg="green")
bad = partial(click.style, fg="red", bold=True)
hint = partial(click.style, fg="yellow")
faint = partial(click.style, dim=True)
strong = partial(click.style, bold=True)

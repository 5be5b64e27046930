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
    """Print *answer* as *output*: json, yaml, or the text that *as_text* returns."""
    show(as_text(answer) if output == "text" else encoded(answer, output))


def encoded(value: Any, output: str) -> str:
    """Return *value* as *output*, json or yaml."""
    import json

    text = json.dumps(value, indent=2)
    return _as_yaml(json.loads(text)) if output == "yaml" else text


def encoded_event(event: Any, output: str) -> str:
    """Return one of many values: a line of JSON, or a document of YAML."""
    import json

    text = json.dumps(event)
    return f"---\n{_as_yaml(json.loads(text))}" if output == "yaml" else text


def _as_yaml(value: Any) -> str:
    import yaml  # which takes as long to import as a short command

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)).rstrip()


good = partial(click.style, fg="green")
bad = partial(click.style, fg="red", bold=True)
hint = partial(click.style, fg="yellow")
faint = partial(click.style, dim=True)
strong = partial(click.style, bold=True)

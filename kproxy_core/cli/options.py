"""The flags of `kproxy_core.config.flags` as options of a command, in the forms that kube-proxy takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from kproxy_core.config.flags import ALIASES, FLAGS, OLDER, Flag, Flags

_T = TypeVar("_T")

NORMAL = {
    "help_option_names": ["-h", "--help"],
    # kube-proxy takes _ for - in the names of flags.
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "max_content_width": 110,
}
"""Settings of every command's context."""

TEXT_OR_JSON = click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)

OBJECTS = frozenset({"manifests", "kubeconfig", "master", "config"})
"""Flags that say where objects are, so that no running proxy is asked."""

_SWITCHES = frozenset(flag.name for flag in FLAGS.values() if not flag.metavar)


def with_flags(*groups: Sequence[Flag]) -> Callable[[Any], Any]:
    """Add an option to a command for each flag of *groups*. Values are text; None: not given."""

    def add(command: Any) -> Any:
        for flag in reversed([flag for group in groups for flag in group]):
            command = click.option(
                f"--{flag.name}", *ALIASES.get(flag.name, ()), flag.parameter,
                metavar=flag.metavar or "", help=flag.help, multiple=flag.repeats, hidden=flag in OLDER,
            )(command)
        return command

    return add


class FlagCommand(click.Command):
    """A command that accepts switches with and without a value, and ``-v=N``."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        own = self.own_switches(arguments)
        return super().parse_args(
            context, [argument if argument in own else _with_value(argument) for argument in arguments])

    def own_switches(self, _arguments: Sequence[str]) -> set[str]:
        """Return the switches of this command alone, which take no value."""
        switches = [parameter for parameter in self.params if getattr(parameter, "is_flag", False)]
        return {name for parameter in switches for name in parameter.opts}


class FlagGroup(FlagCommand, click.Group):
    """A `FlagCommand` that has commands of its own."""

    def own_switches(self, arguments: Sequence[str]) -> set[str]:
        """Return those of the commands that *arguments* name."""
        commands = [self.commands[name] for name in arguments if name in self.commands]
        return {name for command in commands if isinstance(command, FlagCommand)
                for name in command.own_switches(())}  # fmt: skip


def given(options: dict[str, Any]) -> Flags:
    """Return the flags among *options* that were given, each as one text."""
    texts = {name: ",".join(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return Flags({name: text for name, text in texts.items() if text is not None and options[name] != ()})


def parsed(parameter: str, flags: Flags, parse: Callable[[str], _T], default: _T) -> _T:
    """Return the value of a flag that is not part of the configuration. Raises UsageError."""
    try:
        return parse(flags[parameter]) if parameter in flags else default
    except ValueError as error:
        raise click.UsageError(f"--{FLAGS[parameter].name}: {flags[parameter]!r}: {error}") from error


def _with_value(argument: str) -> str:
    if argument.startswith("-v="):
        return "-" + argument
    if argument.startswith("--") and argument[2:].replace("_", "-") in _SWITCHES:
        return argument + "=true"
    return argument

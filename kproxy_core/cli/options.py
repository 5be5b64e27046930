"""The flags of `kproxy_core.config.flags` as options of commands, in the forms that kube-proxy accepts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kproxy_core.config.flags import ALIASES, COMMON, FLAGS, GROUPS, Flag, Flags

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_T = TypeVar("_T")

NORMAL = {
    "help_option_names": ["-h", "--help"],
    # As in kube-proxy, _ and - are equivalent in the names of flags.
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "max_content_width": 110,
}
"""Settings of every command's context."""

FORMATS = click.Choice(["text", "json", "yaml"])

OUTPUT = click.option(
    "-o", "--output", type=FORMATS, default="text", show_default=True, help="Output format.")

VERBOSE = click.option(
    "-v", "--verbose", "v", flag_value="1", default=None, help="Also log the steps, to standard error.")
"""The flag ``--v`` of the proxy, for commands that end by themselves."""

OBJECTS = frozenset({"manifests", "kubeconfig", "master", "config"})
"""Flags that say where to read objects. With one of them, a command does not ask the running proxy."""

_SWITCHES = frozenset(flag.name for flag in FLAGS.values() if not flag.metavar)

_COLUMN = 34
"""The last column of ``--help`` in which texts begin; they begin on the next line beside a longer option."""

Rows = Iterable[tuple[str, str]]
"""Lines of ``--help``: an option, or a command, and its text."""


class FlagOption(click.Option):
    """The option of a flag."""

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        kind = {"FILE": "file", "DIR": "dir"}.get(self.metavar or "")
        if kind is not None:
            return [CompletionItem(incomplete, type=kind)]
        return complete_mode(context, self, incomplete) if self.name == "mode" else []


def complete_mode(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the installed modes that begin with *incomplete*."""
    from click.shell_completion import CompletionItem

    from kproxy_core.contract.registry import Registry

    return [CompletionItem(mode) for mode in Registry().modes if mode.startswith(incomplete)]


def with_flags(*groups: Sequence[Flag]) -> Callable[[Any], Any]:
    """Add an option to a command for each flag of *groups*. Values are text; None: not given."""

    def add(command: Any) -> Any:
        for flag in reversed([flag for group in groups for flag in group]):
            command = click.option(
                f"--{flag.name}", *ALIASES.get(flag.name, ()), flag.parameter, cls=FlagOption,
                metavar=flag.metavar or "", multiple=flag.repeats, hidden=not flag.help,
                help=f"{flag.help}  [default: {flag.default}]" if flag.default else flag.help,
            )(command)
        return command

    return add


class FlagCommand(click.Command):
    """A command that accepts switches with and without a value, and ``-v=N``."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write its own options, the common flags, and a hint at the others."""
        write_rows(formatter, "Options", self.own_rows(context))
        common = list(self.flag_rows(context, COMMON))
        write_rows(formatter, "Configuration and objects", common)
        if common:
            formatter.write_paragraph()
            formatter.write_text(
                "Flags of `kproxy --help` that affect the rules, such as --cluster-cidr, are accepted too.")

    def own_rows(self, context: click.Context) -> Rows:
        """Yield the rows of all options that are not flags."""
        for option in self.get_params(context):
            is_own = isinstance(option, click.Option) and not isinstance(option, FlagOption)
            if is_own and (row := option.get_help_record(context)):
                yield row

    def flag_rows(self, context: click.Context, names: Sequence[str]) -> Rows:
        """Yield the rows of the flags *names* that it has, in this order."""
        options = {option.name: option for option in self.params if isinstance(option, FlagOption)}
        for option in (options.get(name.replace("-", "_")) for name in names):
            if option is not None and (row := option.get_help_record(context)):
                yield row[0].rstrip(), row[1]

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        own = self.own_switches(arguments)
        return super().parse_args(
            context, [argument if argument in own else _with_value(argument) for argument in arguments])

    def own_switches(self, _arguments: Sequence[str]) -> set[str]:
        """Return the switches that are not flags. They take no value."""
        switches = [parameter for parameter in self.params if getattr(parameter, "is_flag", False)]
        return {name for parameter in switches for name in parameter.opts}


class FlagGroup(FlagCommand, click.Group):
    """A `FlagCommand` with commands in modules, which are imported when they are used."""

    def __init__(self, *arguments: Any, summaries: Mapping[str, str], package: str, **options: Any) -> None:
        """*summaries*: by name, the first sentence of each command, whose module is *package*.NAME."""
        super().__init__(*arguments, **options)
        self._summaries = summaries
        self._package = package
        # For click's suggestions. Only `get_command` returns complete ones.
        self.commands = {name: click.Command(name, help=text) for name, text in summaries.items()}

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self._summaries)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self._summaries:
            return None
        command: click.Command = import_module(f"{self._package}.{name}").command
        return command

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, and all flags in groups, the common ones first."""
        write_rows(formatter, "Commands", self._summaries.items())
        write_rows(formatter, "Common options", [*self.flag_rows(context, COMMON), *self.own_rows(context)])
        for title, names in GROUPS.items():
            write_rows(formatter, title, self.flag_rows(context, names))

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [name for name in self._summaries if name.startswith(incomplete)]
        return [*(CompletionItem(name, help=self._summaries[name]) for name in names),
                *click.Command.shell_complete(self, context, incomplete)]  # fmt: skip

    def own_switches(self, arguments: Sequence[str]) -> set[str]:
        """Return its own, and those of the commands that *arguments* name."""
        context = click.Context(self)
        commands = [self.get_command(context, name) for name in arguments]
        return super().own_switches(arguments).union(
            *(command.own_switches(()) for command in commands if isinstance(command, FlagCommand)))


def write_rows(formatter: click.HelpFormatter, title: str, rows: Rows) -> None:
    """Write a section of ``--help``, unless it is empty. Unlike click, break lines at blanks only."""
    found = list(rows)
    if not found:
        return
    formatter.write(f"\n{title}:\n")
    column = min(_COLUMN, max(len(name) for name, _ in found) + 4)
    for name, text in found:
        whole = re.sub(r"\[.*\]$", lambda default: default[0].replace(" ", "\xa0"), text)
        lines = textwrap.wrap(whole, formatter.width - column, break_on_hyphens=False) or [""]
        if len(name) + 4 > column:
            lines = ["", *lines]
        first = f"  {name}".ljust(column) + lines[0]
        rest = [" " * column + line for line in lines[1:]]
        formatter.write("".join(f"{line.rstrip()}\n" for line in (first, *rest)).replace("\xa0", " "))


def given(options: dict[str, Any]) -> Flags:
    """Return the flags that were given, each as one text."""
    texts = {name: ",".join(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return Flags({name: text for name, text in texts.items() if text is not None and options[name] != ()})


def parsed(parameter: str, flags: Flags, parse: Callable[[str], _T], default: _T) -> _T:
    """Return the parsed value of a flag that sets no field, else *default*. Raises UsageError."""
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

"""Write the pages of the manual, docs/man/*.8, from the help of the commands: `make man`.

They are kept in the checkout, because a build of the wheel has setuptools and nothing else.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from kproxy_core.cli.commands import kproxy
from kproxy_core.cli.kubectl import kubectl_kproxy
from kproxy_core.cli.options import FlagCommand, FlagGroup, Rows
from kproxy_core.config.flags import COMMON, GROUPS

PAGES = Path(__file__).parents[1] / "docs" / "man"
SECTION = 8


def pages() -> Iterator[tuple[str, str]]:
    """Yield the file name and the text of each page."""
    for name, group in (("kproxy", kproxy), ("kubectl-kproxy", kubectl_kproxy)):
        assert isinstance(group, FlagGroup)
        words = name.replace("kubectl-", "kubectl ")
        context = click.Context(group, info_name=words, **group.context_settings)
        titles = {each: f"{name}-{each}" for each in group.list_commands(context)}
        rows = [("COMMANDS", [(f"{title}({SECTION})", group.commands[each].help or "")
                              for each, title in titles.items()]),
                ("OPTIONS", [*group.flag_rows(context, COMMON), *group.own_rows(context)]),
                *((title.upper(), list(group.flag_rows(context, names))) for title, names in GROUPS.items())]
        yield f"{name}.{SECTION}", page(name, context, rows, "")
        for each, title in titles.items():
            command = group.get_command(context, each)
            assert isinstance(command, FlagCommand)
            inner = click.Context(command, info_name=each, parent=context)
            common = list(command.flag_rows(inner, COMMON))
            more = f"Flags of {name}({SECTION}) that affect the rules are accepted too." if common else ""
            yield f"{title}.{SECTION}", page(title, inner, [
                ("OPTIONS", command.own_rows(inner)), ("CONFIGURATION AND OBJECTS", common)],
                more, see_also=f"{name}({SECTION})")


def page(
    name: str, context: click.Context, sections: Sequence[tuple[str, Rows]], more: str, see_also: str = ""
) -> str:
    """Return a page for groff, man(7)."""
    paragraphs = inspect.cleandoc(context.command.help or "").split("\n\n")
    summary, *described = (" ".join(paragraph.split()) for paragraph in paragraphs)
    lines = [f'.TH {name.upper()} {SECTION} "" kproxy', ".SH NAME",
             f"{_escaped(name)} \\- {_escaped(summary.rstrip('.').partition('. ')[0])}",
             ".SH SYNOPSIS", f".B {_escaped(context.command_path)}",
             _escaped(" ".join(context.command.collect_usage_pieces(context))), ".SH DESCRIPTION",
             _escaped(summary)]
    for paragraph in described:
        lines += [".PP", _escaped(paragraph)]
    for title, rows in sections:
        rows = list(rows)
        if rows:
            lines.append(f'.SH "{title}"')
        for option, text in rows:
            lines += [".TP", f".B {_escaped(option)}", _escaped(text)]
    if more:
        lines += [".PP", _escaped(more)]
    if see_also:
        lines += [".SH SEE ALSO", see_also]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def main() -> int:
    PAGES.mkdir(exist_ok=True)
    written = dict(pages())
    for name, text in written.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    for path in PAGES.iterdir():
        if path.name not in written:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``kproxy diff``: the plans compared with what the kernel does with packets."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from kproxy_core.app.control import send_request
from kproxy_core.app.requests import Diff
from kproxy_core.cli.options import OBJECTS, OUTPUT, VERBOSE, FlagCommand, given, with_flags
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.terminal import bad, good, hint, show_answer
from kproxy_core.config.flags import RULES, SOURCES, Flags

SAME, DIFFERENT = 0, 1
"""Exit status."""

Found = Mapping[str, Any]


def compare(flags: Flags) -> Found:
    """Return the mode and the differences.

    If *flags* say where to read objects, this process compares, else the running proxy. Raises NoProxy,
    RequestRefused or NoAnswer, and as `cli_errors` expects.
    """
    if not OBJECTS & set(flags):
        return send_request(Diff())
    from kproxy_core.app.answers import diff
    from kproxy_core.cli.objects import read_objects

    with read_objects(flags, this_machine=True) as found:
        return diff(found)


def status_of(found: Found) -> int:
    return DIFFERENT if found["differences"] else SAME


def as_text(found: Found) -> str:
    differences: Sequence[Mapping[str, Any]] = found["differences"]
    if not differences:
        return good(f"the kernel does what the plans say ({found['mode']})")
    return "\n".join(map(_line, differences))


def _line(difference: Mapping[str, Any]) -> str:
    style = hint if difference["kind"] == "unclear" else bad
    of = f" of {difference['service_port']}" if difference["service_port"] else ""
    senders = difference["senders"]
    whom = f" (packets from {', '.join(senders)})" if senders and len(senders) < 3 else ""
    return f"{difference['frontend']}{of}: {style(difference['difference'])}{whom}"


@click.command("diff", cls=FlagCommand)
@VERBOSE
@with_flags(RULES, SOURCES)
@OUTPUT
def command(output: str, **options: Any) -> int:
    """Compare what the kernel does with packets to what it should do.

    Nothing is written. Exit status: 0 if they agree, 1 if they differ or that is unclear.

    The running proxy compares. With --manifests, --kubeconfig, --master or --config, this process does, for
    those objects; a kube-proxy in the same mode may have written the rules.
    """
    with cli_errors():
        found = compare(given(options))
    show_answer(found, output, as_text)
    return status_of(found)

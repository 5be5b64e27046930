"""``kproxy version``: the version, as ``--version`` prints it."""

import click

from kproxy_core.cli.options import OUTPUT, FlagCommand
from kproxy_core.cli.terminal import show_answer
from kproxy_core.config.flags import version_facts, version_text


@click.command("version", cls=FlagCommand)
@OUTPUT
def command(output: str) -> None:
    """Print the version.

    -o json and -o yaml add the commit, and the versions of kube-proxy, Python and the kernel.
    """
    show_answer(version_facts(), output, lambda _: version_text())

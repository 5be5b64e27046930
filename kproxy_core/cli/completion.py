"""``kproxy completion``: the script with which a shell completes ``kproxy``."""

import click
from click.shell_completion import get_completion_class

from kproxy_core.cli.options import FlagCommand


@click.command("completion", cls=FlagCommand)
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion of commands, flags and modes for a shell.

    SHELL is bash, zsh or fish. For bash: `source <(kproxy completion bash)`. For zsh, after compinit: `source
    <(kproxy completion zsh)`. For fish: `kproxy completion fish | source`.
    """
    root = context.find_root().command
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(root, {}, "kproxy", "_KPROXY_COMPLETE").source())

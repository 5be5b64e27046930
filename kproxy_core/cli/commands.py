"""``kproxy`` itself, and the table of its commands."""

import os
import sys
from typing import Any

import click

from kproxy_core.cli.options import FORMATS, NORMAL, FlagGroup, given, parsed, with_flags
from kproxy_core.cli.run import run, write_config
from kproxy_core.config.flags import OLDER, PROCESS, RULES, spared_by_cleanup, truth, version_told

COMMANDS = {
    "modes": "List the installed modes, and find out which work here.",
    "status": "Say whether this node's proxy is well, and all that is wrong.",
    "explain": "Explain what happens to packets to a Service, and why.",
    "diff": "Compare what the kernel does with packets to what it should do.",
    "verify": "Connect to every Service by TCP, and report which endpoints answer.",
    "doctor": "Find what on this node hurts Services.",
    "trace": "Watch the next packets to a Service, and show what happens to each.",
    "top": "Show the traffic of each Service, live.",
    "plan": "Show what would change on this node if other objects were served.",
    "switch": "Switch the running proxy to another mode; connections stay open.",
    "render": "Print the rules for a directory of manifests.",
    "report": "Write an archive for a bug report.",
    "version": "Print the version.",
    "completion": "Print the completion of commands, flags and modes for a shell.",
    "unit": "Print a systemd unit that runs kproxy as a service of this machine.",
}
"""The first sentence of each command's help. Its module is imported only when the command is used."""


_BROKEN_PIPE = 141
"""As a shell sees a program that SIGPIPE has ended."""


def main() -> None:
    """Run the console script."""
    run_script(kproxy)


def run_script(command: click.Command) -> None:
    """Run *command*. Exit with status 0, with its own, or with 1 or 2 for an error.

    If no process reads the output any more, as after ``| head``, exit as a program that SIGPIPE ends.
    """
    stdout = sys.stdout
    try:
        status = command.main(standalone_mode=False)
        if stdout is not None and not stdout.closed:
            stdout.flush()
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except click.Abort:
        status = 1
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and sys.stdout is stdout:
            raise
        # Else click has replaced it for EPIPE. Python flushes the rest once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = _BROKEN_PIPE
    sys.exit(status if isinstance(status, int) else 0)


@click.group(
    "kproxy", cls=FlagGroup, summaries=COMMANDS, package=__package__, invoke_without_command=True,
    context_settings=NORMAL)
@with_flags(RULES, PROCESS, OLDER)
@click.option("-o", "--output", type=FORMATS,
              help="Output format of --cleanup.  [default: text]")
@click.pass_context
def kproxy(context: click.Context, /, output: str | None, **options: Any) -> None:
    """Kubernetes service proxy. Without a command, runs the proxy on this node.

    Accepts the flags and the configuration file of kube-proxy. Flags that have no effect, and those of older
    releases, are accepted but not listed.
    """
    flags = given(options)
    version = parsed("version", flags, version_told, "")
    if version:
        click.echo(version)
        context.exit()
    if context.invoked_subcommand is not None:
        return
    cleanup, dry_run, own_only = (
        parsed(name, flags, truth, False) for name in ("cleanup", "dry_run", "own_only"))
    if not cleanup and (dry_run or own_only or output):
        raise click.UsageError("--dry-run, --own-only and --output require --cleanup")
    if "write_config_to" in flags:
        write_config(flags)
    elif cleanup:
        from kproxy_core.cli.cleanup import clean

        try:
            spared = spared_by_cleanup(flags)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        clean(flags, spared, dry_run=dry_run, own_only=own_only, output=output or "text")
    else:
        run(flags, init_only=parsed("init_only", flags, truth, False))

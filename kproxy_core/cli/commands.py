"""The commands and their options."""

import sys
from typing import Any

import click

from kproxy_core.cli.inspection.commands import COMMANDS
from kproxy_core.cli.options import NORMAL, TEXT_OR_JSON, FlagCommand, FlagGroup, given, parsed, with_flags
from kproxy_core.cli.running import cli_errors, run, warn_of_broken, write_config
from kproxy_core.cli.terminal import show
from kproxy_core.config.flags import OLDER, PROCESS, RULES, spared_by_cleanup, truth, version_told


def main() -> None:
    """Run the console script. Exit with status 0, with that of the command, or with 1 for wrong usage."""
    try:
        status = kproxy.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = 1 if isinstance(error, click.UsageError) else error.exit_code
    except click.Abort:
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


@click.group(cls=FlagGroup, invoke_without_command=True, context_settings=NORMAL)
@with_flags(RULES, PROCESS, OLDER)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), help="Of --cleanup; text by default.")
@click.pass_context
def kproxy(context: click.Context, /, output: str | None, **options: Any) -> None:
    """A Kubernetes service proxy. Without a command, runs it."""
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
        from kproxy_core.cli.cleaning import clean

        try:
            spared = spared_by_cleanup(flags)
        except ValueError as error:
            raise click.UsageError(f"--cleanup of some modes: {error}") from error
        clean(flags, spared, dry_run=dry_run, own_only=own_only, as_json=output == "json")
    else:
        run(flags, init_only=parsed("init_only", flags, truth, False))


@kproxy.command(cls=FlagCommand)
@click.argument("only", metavar="[MODE]", default="")
@with_flags(RULES)
@click.option("--probe", is_flag=True, help="Find out which work on this machine, and what is missing.")
@click.option("--load-modules", is_flag=True, help="With --probe: load kernel modules for it.")
@click.option("-o", "--output", type=click.Choice(["text", "json", "yaml"]), default="text",
              show_default=True)
def modes(only: str, probe: bool, load_modules: bool, output: str, **options: Any) -> int:
    """List the installed backends, the preferred one first, or only MODE.

    With --probe the exit status is 0 if MODE works on this machine (without one: any), else 1.
    """
    from kproxy_core.backend.registry import Registry
    from kproxy_core.cli.modes import describe, find_out, formatted
    from kproxy_core.process.terms import Configuration

    if load_modules and not probe:
        raise click.UsageError("--load-modules requires --probe")
    flags = given(options)
    with cli_errors():
        configuration = Configuration.read(flags)
        registry = Registry(plugins=configuration.of("").kproxy.plugins)
        mode = only or flags.get("mode", "")
        if probe:
            report = find_out(registry, mode, configuration, load_modules=load_modules)
        else:
            report = describe(registry, mode)
    show(formatted(report, output))
    warn_of_broken(registry)
    return 0 if report.works(mode or configuration.mode) else 1


@kproxy.command()
@click.argument("mode")
@click.option("--check", is_flag=True, help="Only say what would change for this node's Services.")
@TEXT_OR_JSON
def switch(mode: str, check: bool, output: str) -> None:
    """Have the proxy that runs here serve in another MODE. Connections don't notice."""
    from kproxy_core.cli import switching

    with cli_errors():
        if not check:
            switching.switch(mode, as_json=output == "json")
        elif not switching.check(mode, as_json=output == "json"):
            raise click.ClickException(f"not everything would be served with {mode}")


@kproxy.command(cls=FlagCommand)
@with_flags(RULES)
@click.option("--family", type=click.Choice(["ipv4", "ipv6"]), help="Only this one.")
@click.option("--check", is_flag=True, help="Only say whether the mechanism's own program takes the rules.")
def render(family: str | None, check: bool, **options: Any) -> None:
    """Print the rules that the manifests ask for. The kernel is left alone, and no privileges are needed.

    With --check, rules that are text for nft are checked in a network namespace of their own. Exit status: 0
    if they are accepted, else 1.
    """
    from kproxy_core.cli.rendering import checked, rendered
    from kproxy_core.model.address import Family

    families = tuple(f for f in Family if family in (None, f.label.lower()))
    with cli_errors():
        for line in (checked if check else rendered)(given(options), families):
            click.echo(line)


for command in COMMANDS:
    kproxy.add_command(command)

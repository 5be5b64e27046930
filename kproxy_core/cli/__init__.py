"""The command line: what to run, with which settings; and how it ends.

Whatever is heavy is imported by the command that needs it, so that ``--version`` and
``--help`` answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kproxy_core.cli.options import NORMAL, FlagCommand, FlagGroup, with_flags
from kproxy_core.config.flags import (
    FLAGS,
    OLDER,
    PROCESS,
    RULES,
    Flags,
    spared_by_cleanup,
    truth,
    version_told,
)

if TYPE_CHECKING:
    from kproxy_core.backend.registry import Registry
    from kproxy_core.cli.modes import Report
    from kproxy_core.config.settings import Config
    from kproxy_core.process.terms import Configuration

_T = TypeVar("_T")

def main() -> None:
    """The console script. Ends with status 0, or 1 whatever went wrong."""
    try:
        status = kproxy.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = 1
    except click.Abort:
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


@click.group(cls=FlagGroup, invoke_without_command=True, context_settings=NORMAL)
@with_flags(RULES, PROCESS, OLDER)
@click.pass_context
def kproxy(context: click.Context, /, **options: Any) -> None:
    """A Kubernetes service proxy. Without a command, runs it."""
    flags = _given(options)
    told = _judged("version", flags, version_told, "")
    if told:
        click.echo(told)
        context.exit()
    if context.invoked_subcommand is not None:
        return
    dry_run = _judged("dry_run", flags, truth, False)
    own_only = _judged("own_only", flags, truth, False)
    if (dry_run or own_only) and not _judged("cleanup", flags, truth, False):
        raise click.UsageError("--dry-run and --own-only go with --cleanup")
    if "write_config_to" in flags:
        _write_config(flags)
    elif _judged("cleanup", flags, truth, False):
        try:
            spared = spared_by_cleanup(flags)
        except ValueError as error:
            raise click.UsageError(f"--cleanup of some modes: {error}") from error
        _clean(flags, dry_run, own_only, spared)
    else:
        _run(flags, _judged("init_only", flags, truth, False))


@kproxy.command(cls=FlagCommand)
@click.argument("only", metavar="[MODE]", default="")
@with_flags(RULES)
@click.option("--probe", is_flag=True, help="Find out which work on this machine, and what is missing.")
@click.option("--load-modules", is_flag=True, help="With --probe: load kernel modules for it.")
@click.option("-o", "--output", type=click.Choice(["text", "json", "yaml"]), default="text",
              show_default=True)
@click.pass_context
def modes(
    context: click.Context, /, only: str, probe: bool, load_modules: bool, output: str, **options: Any
) -> None:
    """List the installed backends, the preferred one first, or only MODE.

    With --probe the exit status is 0 if MODE works on this machine (without one: any), else 1.
    """
    from kproxy_core.cli.modes import describe, find_out
    from kproxy_core.process.terms import Configuration

    if load_modules and not probe:
        raise click.UsageError("--load-modules goes with --probe")
    flags = _given(options)
    with _errors():
        configuration = Configuration.read(flags)
        registry = _registry(configuration.of("").plugins)
        mode = only or flags.get("mode", "")
        if probe:
            report = find_out(registry, mode, configuration, load_modules=load_modules)
        else:
            report = describe(registry, mode)
    click.echo(_written(report, output))
    _tell_broken(registry)
    if not report.works(mode or configuration.mode):
        context.exit(1)


def _written(report: Report, output: str) -> str:
    if output == "json":
        import json

        return json.dumps(report.as_document(), indent=2)
    if output == "yaml":
        import yaml

        return str(yaml.safe_dump(report.as_document(), sort_keys=False, allow_unicode=True)).rstrip()
    return str(report)


@kproxy.command()
@click.argument("mode")
@click.option("--check", is_flag=True, help="Only say what would change for this node's Services.")
def switch(mode: str, check: bool) -> None:
    """Have the proxy that runs here serve in another MODE. Connections don't notice."""
    from kproxy_core.cli import switching
    from kproxy_core.modes.control import NoProxy, RequestRefused

    try:
        if check:
            if not switching.check(mode, click.echo):
                raise click.ClickException(f"with {mode} something would be lost")
        else:
            switching.switch(mode, click.echo)
    except (NoProxy, RequestRefused) as error:
        raise click.ClickException(str(error)) from error


@kproxy.command(cls=FlagCommand)
@with_flags(RULES)
@click.option("--family", type=click.Choice(["ipv4", "ipv6"]), help="Only this one.")
def render(family: str | None, **options: Any) -> None:
    """Print the rules that the manifests ask for. The kernel is left alone, and no privileges are needed."""
    from kproxy_core.model.address import Family
    from kproxy_core.observe import logs

    with _errors():
        config, registry, configuration = _prepared(_given(options))
        if not config.manifests:
            raise click.UsageError("render needs --manifests")
        if not config.mode:
            from kproxy_core.process.choice import conclude
            from kproxy_core.process.terms import served_families

            config = configuration.of(conclude(configuration, registry, served_families()))
        logs.set_up(0, "text")
        from kproxy_core.cli.rendering import render_manifests

        families = tuple(f for f in Family if family in (None, f.label.lower()))
        for rules in render_manifests(config, registry, families):
            click.echo(rules)


def _given(options: dict[str, Any]) -> Flags:
    """The flags that were given, each as one text."""
    texts = {name: ",".join(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return Flags({name: text for name, text in texts.items() if text is not None and options[name] != ()})


def _judged(parameter: str, flags: Flags, judge: Callable[[str], _T], default: _T) -> _T:
    """What the flag means that isn't part of the configuration."""
    try:
        return judge(flags[parameter]) if parameter in flags else default
    except ValueError as error:
        raise click.UsageError(f"--{FLAGS[parameter].name}: {flags[parameter]!r}: {error}") from error


def _run(flags: Flags, init_only: bool) -> None:
    from kproxy_core.observe import logs

    with _errors():
        config, registry, configuration = _prepared(flags)
        logs.set_up(config.verbosity, config.logging_format)
        from kproxy_core.process import assembly as process

    for told in (*config.notices, *registry.broken):
        process.log.warning(str(told))
    try:
        with _errors():
            if init_only:
                process.set_up(config, registry, configuration)
            else:
                process.run(config, registry, configuration)
    except click.ClickException as error:
        process.log.error(error.message)
        sys.exit(1)


def _write_config(flags: Flags) -> None:
    """The configuration in effect goes into the file that ``--write-config-to`` names."""
    from kproxy_core.config.write import written
    from kproxy_core.process.terms import Configuration

    path = flags["write_config_to"]
    with _errors():
        config = Configuration.read(flags).asked
        text = written(config)
        try:
            with open(path, "w", encoding="utf-8") as output:
                output.write(text)
        except OSError as error:
            raise click.ClickException(f"--write-config-to: {path!r}: {error.strerror}") from error
    for notice in config.notices:
        click.echo(f"Warning: {notice}", err=True)
    click.echo(f"the configuration was written to {path}", err=True)


def _clean(flags: Flags, dry_run: bool, own_only: bool, spared: tuple[str, ...]) -> None:
    """Every mode but those *spared* cleans up after itself; what one can't do keeps no other from it."""
    from kproxy_core.process.terms import Configuration, served_families, settings_of_modes

    with _errors():
        configuration = Configuration.read(flags)
        registry = _registry(configuration.asked.plugins)
        settings_of = settings_of_modes(configuration, served_families())
    told: set[str] = set()
    failed = False
    for description in registry.load_all():
        if description.mode in spared:
            continue
        with _errors():
            settings = settings_of(description.mode)
        left = registry.cleanup(description.mode, settings, dry_run=dry_run, own_only=own_only)
        for removed in left.removed:
            if removed not in told:  # Two modes would remove it; the first one does.
                click.echo(f"{left.mode}: {removed}{' would be' if dry_run else ''} removed")
        told.update(left.removed)
        for error in left.errors:
            click.echo(f"{left.mode}: {error}", err=True)
        failed = failed or bool(left.errors)
    _tell_broken(registry)
    if failed:
        raise click.ClickException("not everything could be removed")


def _registry(plugins: Iterable[str]) -> Registry:
    from kproxy_core.backend.registry import Registry

    return Registry(plugins=plugins)


def _tell_broken(registry: Registry) -> None:
    for broken in registry.broken:
        click.echo(f"Warning: {broken}", err=True)


def _prepared(flags: Flags) -> tuple[Config, Registry, Configuration]:
    """What is in effect, as far as it was asked for; the plugins; what was asked for."""
    from kproxy_core.modes.journal import Journal
    from kproxy_core.process.terms import Configuration

    configuration = Configuration.read(flags)
    config = configuration.of(configuration.mode)
    registry = _registry(config.plugins)
    mode = Journal(config.state_directory).starting_mode(config.mode, registry.modes) or config.mode
    if mode != config.mode:
        config = configuration.of(mode)
    if mode:
        registry.load(mode)
    return config, registry, configuration


@contextmanager
def _errors() -> Iterator[None]:
    """What is known to go wrong becomes one line and status 1; anything else is a bug and shows as one."""
    from kproxy_core.backend.errors import BackendError
    from kproxy_core.config.settings import ConfigError
    from kproxy_core.host.errors import HostError
    from kproxy_core.process.terms import StartFailed

    try:
        yield
    except ConfigError as error:
        raise click.ClickException("\n".join(map(str, error.problems))) from error
    except (BackendError, HostError, StartFailed) as error:
        raise click.ClickException(str(error)) from error

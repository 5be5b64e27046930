"""The command line: what to run, with which settings; and how it ends.

Whatever is heavy is imported by the command that needs it, so that ``--version`` and
``--help`` answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from kproxy_core import __version__

if TYPE_CHECKING:
    from kproxy_core.backend.registry import Registry
    from kproxy_core.config import Config

_NAMES = {
    "help_option_names": ["-h", "--help"],
    # kube-proxy takes _ for - in the names of flags.
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "max_content_width": 110,
}

_SETTINGS = (
    click.option("--config", "file", metavar="FILE", help="A KubeProxyConfiguration; replaces the flags."),
    click.option("--mode", "--proxy-mode", metavar="MODE", help="The backend: see `kproxy modes`."),
    click.option("--manifests", metavar="DIR", help="Read Services and endpoints from the files in DIR."),
    click.option("--hostname-override", metavar="NAME", help="This node's name, if not the machine's."),
    click.option("--bind-address", metavar="IP", help="The node's own address, if not its Node object's."),
    click.option("--detect-local-mode", metavar="HOW",
                 help="ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix."),
    click.option("--cluster-cidr", metavar="CIDRS", help="Networks of the pods, one of each IP family."),
    click.option("--pod-bridge-interface", metavar="NAME", help="For BridgeInterface."),
    click.option("--pod-interface-name-prefix", metavar="PREFIX", help="For InterfaceNamePrefix."),
    click.option("--nodeport-addresses", metavar="CIDRS", help="Networks of node ports, or `primary`."),
    click.option("--masquerade-all/--no-masquerade-all", default=None,
                 help="Masquerade all traffic to Services."),
)
"""What decides about the rules."""

_PROCESS = (
    click.option("--master", metavar="URL", help="The API server."),
    click.option("--kubeconfig", metavar="FILE", help="Where the API server is, and the credentials for it."),
    click.option("--healthz-bind-address", metavar="IP:PORT", help="For health checks."),
    click.option("--metrics-bind-address", metavar="IP:PORT", help="For metrics."),
    click.option("-v", "--v", type=int, metavar="N", help="Log more: 2 shows each sync."),
    click.option("--logging-format", type=click.Choice(["text", "json"]), help="Of the log lines."),
)
"""What decides about the process."""


def _with(options: tuple[Callable[[Any], Any], ...]) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


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


@click.group(invoke_without_command=True, context_settings=_NAMES)
@_with(_SETTINGS)
@_with(_PROCESS)
@click.option("--cleanup", is_flag=True, help="Remove all rules of all modes, and exit.")
@click.option("--dry-run", is_flag=True, help="With --cleanup: only say what would be removed.")
@click.version_option(__version__, prog_name="kproxy", message="%(prog)s %(version)s")
@click.pass_context
def kproxy(context: click.Context, /, file: str | None, cleanup: bool, dry_run: bool, **flags: Any) -> None:
    """A Kubernetes service proxy. Without a command, runs it."""
    if context.invoked_subcommand is not None:
        return
    if dry_run and not cleanup:
        raise click.UsageError("--dry-run goes with --cleanup")
    if cleanup:
        _clean(dry_run)
    else:
        _run(file, flags)


@kproxy.command()
@click.option("--probe", is_flag=True, help="Find out which work on this machine, and what is missing.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def modes(probe: bool, output: str) -> None:
    """List the installed backends, the preferred one first."""
    from kproxy_core.cli.modes import describe_modes

    registry = _registry()
    described = describe_modes(registry, probe=probe)
    if output == "json":
        import json

        click.echo(json.dumps([mode.as_document() for mode in described], indent=2))
    else:
        for mode in described:
            click.echo(mode)
    _tell_broken(registry)


@kproxy.command()
@_with(_SETTINGS)
@click.option("--family", type=click.Choice(["ipv4", "ipv6"]), help="Only this one.")
def render(file: str | None, family: str | None, **flags: Any) -> None:
    """Print the rules that the manifests ask for. The kernel is left alone, and no privileges are needed."""
    from kproxy_core.model.address import Family
    from kproxy_core.run import logs

    with _errors():
        config, registry = _prepared(file, flags)
        if not config.manifests:
            raise click.UsageError("render needs --manifests")
        logs.set_up(0, "text")
        from kproxy_core.cli.rendering import render_manifests

        families = tuple(f for f in Family if family in (None, f.label.lower()))
        for rules in render_manifests(config, registry, families):
            click.echo(rules)


def _run(file: str | None, flags: dict[str, Any]) -> None:
    from kproxy_core.run import logs

    with _errors():
        config, registry = _prepared(file, flags)
        logs.set_up(config.verbosity, config.logging_format)
        from kproxy_core.cli import process

    for told in (*config.notices, *registry.broken):
        process.log.warning(str(told))
    try:
        with _errors():
            process.run(config, registry)
    except click.ClickException as error:
        process.log.error(error.message)
        sys.exit(1)


def _clean(dry_run: bool) -> None:
    """Every mode cleans up after itself; what one can't do keeps no other from it."""
    registry = _registry()
    failed = False
    for description in registry.load_all():
        left = registry.cleanup(description.mode, dry_run=dry_run)
        for removed in left.removed:
            click.echo(f"{left.mode}: {removed}{' would be' if dry_run else ''} removed")
        for error in left.errors:
            click.echo(f"{left.mode}: {error}", err=True)
        failed = failed or bool(left.errors)
    _tell_broken(registry)
    if failed:
        raise click.ClickException("not everything could be removed")


def _registry() -> Registry:
    from kproxy_core.backend.registry import Registry

    return Registry()


def _tell_broken(registry: Registry) -> None:
    for broken in registry.broken:
        click.echo(f"Warning: {broken}", err=True)


def _prepared(file: str | None, flags: dict[str, Any]) -> tuple[Config, Registry]:
    """The configuration in effect, with a mode in any case, and the plugins."""
    from kproxy_core import config as configuration

    given = configuration.Flags(**flags)
    loaded = configuration.load(file) if file else None
    config = configuration.resolve(given, loaded)
    registry = _registry()
    if not config.mode:
        from kproxy_core.cli import process

        probing = process.backend_settings(config, process.served_families())
        config = configuration.resolve(replace(given, mode=registry.preferred(probing)), loaded)
    registry.load(config.mode)
    return config, registry


@contextmanager
def _errors() -> Iterator[None]:
    """What is known to go wrong becomes one line and status 1; anything else is a bug and shows as one."""
    from kproxy_core.backend.errors import BackendError
    from kproxy_core.cli.process import StartFailed
    from kproxy_core.config import ConfigError
    from kproxy_core.host.errors import HostError

    try:
        yield
    except ConfigError as error:
        raise click.ClickException("\n".join(map(str, error.problems))) from error
    except (BackendError, HostError, StartFailed) as error:
        raise click.ClickException(str(error)) from error

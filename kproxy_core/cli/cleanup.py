"""``kproxy --cleanup``: the removal of all rules."""

from collections.abc import Iterator

import click

from kproxy_core.cli.run import cli_errors, warn_of_broken
from kproxy_core.cli.terminal import bad, encoded, is_terminal, show, strong
from kproxy_core.config.flags import Flags
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import Leftovers
from kproxy_core.linux import process
from kproxy_core.modes.settings import Configuration, served_families, settings_of_modes
from kproxy_core.sync.resets import clean_up_resets


def clean(flags: Flags, spared: tuple[str, ...], *, dry_run: bool, own_only: bool, output: str) -> None:
    """Remove the leftovers of all modes but *spared*. Raises ClickException at the end if some remain."""
    if "CAP_NET_ADMIN" not in process.network_privileges():
        raise click.ClickException("permission denied, run as root or with CAP_NET_ADMIN")
    with cli_errors():
        configuration = Configuration.read(flags)
        registry = Registry(plugins=configuration.asked.kproxy.plugins)
    results = []
    for left in _cleaned(registry, configuration, spared, dry_run=dry_run, own_only=own_only):
        results.append(left)
        if output == "text":
            _show(left, dry_run)
    if output != "text":
        modes = [{"mode": left.mode, "removed": left.removed, "errors": left.errors} for left in results]
        click.echo(encoded({"dry_run": dry_run, "modes": modes}, output))
    elif is_terminal():
        counts = ", ".join(f"{left.mode} {len(left.removed)}" for left in results)
        would = "would be " if dry_run else ""
        show(strong(f"{sum(len(left.removed) for left in results)} objects {would}removed ({counts})"))
    warn_of_broken(registry)
    if any(left.errors for left in results):
        raise click.ClickException("not everything could be removed")


def _cleaned(
    registry: Registry, configuration: Configuration, spared: tuple[str, ...], *,
    dry_run: bool, own_only: bool,
) -> Iterator[Leftovers]:
    """Clean up mode by mode. An object or error that two modes have in common is reported for the first."""
    settings_of = settings_of_modes(configuration, served_families())
    seen: set[str] = set()
    for description in registry.load_all():
        if description.mode in spared:
            continue
        with cli_errors():
            settings = settings_of(description.mode)
        left = registry.cleanup(description.mode, settings, dry_run=dry_run, own_only=own_only)
        removed, errors = (
            tuple(what for what in found if what not in seen) for found in (left.removed, left.errors))
        seen.update(removed, errors)
        yield Leftovers(removed, errors, mode=left.mode)
    left = clean_up_resets(dry_run=dry_run)
    if left.removed or left.errors:
        yield left


def _show(left: Leftovers, dry_run: bool) -> None:
    for removed in left.removed:
        click.echo(f"{left.mode}: {removed}{' would be' if dry_run else ''} removed")
    for error in left.errors:
        click.echo(bad(f"{left.mode}: {error}"), err=True)

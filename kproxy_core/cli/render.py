"""``kproxy render``: the rules for a directory of manifests, without touching the kernel."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from msgspec.structs import replace

from kproxy_core.cli.objects import Objects, read_objects
from kproxy_core.cli.options import VERBOSE, FlagCommand, given, with_flags
from kproxy_core.cli.run import cli_errors
from kproxy_core.config.flags import RULES, Flags
from kproxy_core.contract.values import Scope, Update
from kproxy_core.model.address import Family
from kproxy_core.modes.settings import Configuration


def rendered(flags: Flags, families: tuple[Family, ...]) -> Iterator[str]:
    """Yield the complete rules of each of *families*, in the text format of the mode's backend.

    Raises ClickException if the mode has no such text, UsageError without manifests, and as `cli_errors`
    expects.
    """
    with _updates(flags, families) as (found, updates):
        for update in updates:
            text = found.instance.render(update)
            if text is None:
                raise click.ClickException(f"mode {found.instance.mode} has no rules as text")
            yield text


def checked(flags: Flags, families: tuple[Family, ...]) -> Iterator[str]:
    """Yield a line for each of *families* whose rules nft accepts.

    Raises ClickException if nft rejects them, they are not text for it, or an object has a mistake, and as
    `rendered` does.
    """
    with _updates(flags, families) as (found, updates):
        instance = found.instance
        for update in updates:
            rules = f"the {update.family.label} rules of mode {instance.mode}"
            complaint = instance.check_text(update)
            if complaint is None:
                raise click.ClickException(f"{rules} cannot be checked: they are not text for nft")
            if complaint:
                raise click.ClickException(f"{rules} are refused: {complaint.strip()}")
            yield f"{rules} are accepted"
        if count := len(found.bad):
            raise click.ClickException(f"{count} mistake{'s' * (count > 1)} in objects, named above")


@contextmanager
def _updates(
    flags: Flags, families: tuple[Family, ...]
) -> Iterator[tuple[Objects, Iterator[Update]]]:
    """Yield the plans with a backend, and the updates that it would get. Raises as `rendered` does."""
    if not Configuration.read(flags).asked.kproxy.manifests:
        raise click.UsageError("render needs --manifests")
    with read_objects(flags, this_machine=False, families=families) as found:
        yield found, (_sorted(plans.update(Scope.RESYNC)) for plans in found.plans.values())


def _sorted(update: Update) -> Update:
    """Return *update* in the order of its keys. Planning iterates over sets, in an order that varies."""
    plans, changed = sorted(update.plans.items()), sorted(update.changed.items())
    return replace(update, plans=dict(plans), changed=dict(changed))


@click.command("render", cls=FlagCommand)
@VERBOSE
@with_flags(RULES)
@click.option("--family", type=click.Choice(["ipv4", "ipv6"]), help="Only the rules of this IP family.")
@click.option("--check", is_flag=True, help="Do not print the rules, but check that nft accepts them.")
def command(family: str | None, check: bool, **options: Any) -> None:
    """Print the rules for a directory of manifests.

    Requires --manifests, but no privileges, and does not touch the kernel. --check needs rules that are text
    for nft, and checks them in a network namespace of its own. Exit status: 0 if they are accepted and no
    object has a mistake, else 1.
    """
    families = tuple(f for f in Family if family in (None, f.label.lower()))
    with cli_errors():
        for line in (checked if check else rendered)(given(options), families):
            click.echo(line)

"""``kproxy render``: the rules for a directory of manifests, without touching the kernel."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
from msgspec.structs import replace

from kproxy_core.cli.objects import read_objects
from kproxy_core.config.flags import Flags
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.values import Scope, Update
from kproxy_core.model.address import Family
from kproxy_core.modes.settings import Configuration


def rendered(flags: Flags, families: tuple[Family, ...]) -> Iterator[str]:
    """Yield the complete rules of each of *families*, in the text format of the mode's backend.

    Raises UsageError without manifests, and as `cli_errors` expects.
    """
    with _updates(flags, families) as (instance, updates):
        yield from map(instance.render, updates)


def checked(flags: Flags, families: tuple[Family, ...]) -> Iterator[str]:
    """Yield a line for each of *families* whose rules the mechanism's own program takes.

    Raises ClickException if it does not, or cannot be asked; UsageError, and as `rendered` does.
    """
    with _updates(flags, families) as (instance, updates):
        for update in updates:
            rules = f"the {update.family.label} rules of mode {instance.mode}"
            complaint = instance.check_text(update)
            if complaint is None:
                raise click.ClickException(f"{rules} cannot be checked: they are not text for nft")
            if complaint:
                raise click.ClickException(f"{rules} are refused: {complaint.strip()}")
            yield f"{rules} are accepted"


@contextmanager
def _updates(
    flags: Flags, families: tuple[Family, ...]
) -> Iterator[tuple[BackendInstance, Iterator[Update]]]:
    """Yield a backend of the mode, and what it would be given. Raises as `rendered` does."""
    if not Configuration.read(flags).asked.kproxy.manifests:
        raise click.UsageError("render needs --manifests")
    with read_objects(flags, this_machine=False, families=families) as found:
        yield found.instance, (_sorted(plans.update(Scope.RESYNC)) for plans in found.plans.values())


def _sorted(update: Update) -> Update:
    """Return *update* in the order of its keys. Planning iterates over sets, in an order that varies."""
    plans, changed = sorted(update.plans.items()), sorted(update.changed.items())
    return replace(update, plans=dict(plans), changed=dict(changed))

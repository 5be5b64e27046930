"""``kproxy render``: the rules for a directory of manifests, without touching the kernel."""

from collections.abc import Iterator

import click
from msgspec.structs import replace

from kproxy_core.backend.api import Scope, Update
from kproxy_core.cli.inspection.objects import read_objects
from kproxy_core.config.flags import Flags
from kproxy_core.model.address import Family
from kproxy_core.process.terms import Configuration


def rendered(flags: Flags, families: tuple[Family, ...]) -> Iterator[str]:
    """Yield the complete rules of each of *families*, in the text format of the mode's backend.

    Raises UsageError without manifests, and as `cli_errors` expects.
    """
    if not Configuration.read(flags).asked.kproxy.manifests:
        raise click.UsageError("render needs --manifests")
    with read_objects(flags, this_machine=False, families=families) as found:
        for plans in found.plans.values():
            yield found.instance.render(_sorted(plans.update(Scope.RESYNC)))


def _sorted(update: Update) -> Update:
    """Return *update* in the order of its keys. Planning iterates over sets, in an order that varies."""
    plans, changed = sorted(update.plans.items()), sorted(update.changed.items())
    return replace(update, plans=dict(plans), changed=dict(changed))

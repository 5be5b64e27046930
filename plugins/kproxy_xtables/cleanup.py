"""Removing a mode's chains and rules from the tables of every interface and family."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family
from kproxy_xtables.removal import Held, Removal, described, inputs, speaking_of_kubernetes
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import NoVariant, Variant, find_variant, find_variants


@dataclass(slots=True)
class Cleaned:
    """What came of it."""

    removed: list[str] = field(default_factory=list)
    """One line for each object; those that would be, in a dry run."""
    errors: list[str] = field(default_factory=list)


def clean(
    decide: Callable[[Held], Removal],
    variants: Iterable[Variant],
    *,
    dry_run: bool,
    counted: Collection[str] = (),
    look_at: Callable[[Tables], bool] | None = None,
) -> Cleaned:
    """Remove what *decide* says, family by family; what goes wrong in one keeps no other from it.

    Chains whose names begin with one of *counted* are counted, not told one by one. *look_at* tells
    whether tables are worth reading.
    """
    cleaned = Cleaned()
    for tables in (Tables(family, variant) for variant in variants for family in Family):
        try:
            if look_at is not None and not look_at(tables):
                continue
            removal = decide(speaking_of_kubernetes(tables.save()))
        except HostError as error:
            if not tables.missing():
                cleaned.errors.append(f"{tables.program}: {error}")
            continue
        try:
            if not dry_run:
                carry_out(removal, tables)
        except HostError as error:
            cleaned.errors.append(f"{tables.program}: {error}")
            continue
        cleaned.removed += [f"{tables.program}: {line}" for line in described(removal, counted)]
        cleaned.errors += [f"{tables.program}: {reason}" for reason in removal.kept]
    return cleaned


def carry_out(removal: Removal, tables: Tables) -> None:
    """Remove what was decided. Raises HostError."""
    for text in inputs(removal, tables.chains_per_call):
        tables.restore(text)


def used_and_unused() -> tuple[list[Variant], list[Variant]]:
    """The iptables that this node uses, and the others installed; without a usable one all may be used."""
    found = find_variants()
    try:
        used = find_variant()
    except NoVariant:
        return found, []
    return [used], [variant for variant in found if variant != used]

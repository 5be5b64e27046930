"""Removal of a mode's chains and rules from the tables of all variants and IP families."""

from collections.abc import Callable, Collection, Iterable

from kproxy_core.contract import Family, HostError, Leftovers
from kproxy_xtables.removal import Removal, describe, kubernetes_rules, restore_inputs
from kproxy_xtables.rules import RulesByChain
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import Variant


def clean_up(
    decide: Callable[[RulesByChain], Removal], variants: Iterable[Variant], *, dry_run: bool,
    counted: Collection[str] = (), is_affected: Callable[[Tables], bool] = lambda _: True,
) -> Leftovers:
    """Remove the chains and rules that *decide* selects. A failure in one family does not affect the others.

    Chains whose names begin with one of *counted* are reported as a number. Tables for which *is_affected*
    returns False are not read.
    """
    removed: list[str] = []
    errors: list[str] = []
    for tables in (Tables(family, variant) for variant in variants for family in Family):
        try:
            if not is_affected(tables):
                continue
            removal = decide(kubernetes_rules(tables.save()))
            if not dry_run:
                apply_removal(removal, tables)
        except HostError as error:
            if not tables.is_missing():
                errors.append(f"{tables.program}: {error}")
            continue
        removed += [f"{tables.program}: {line}" for line in describe(removal, counted)]
        errors += [f"{tables.program}: {reason}" for reason in removal.kept]
    return Leftovers(tuple(removed), tuple(errors))


def apply_removal(removal: Removal, tables: Tables) -> None:
    """Delete the rules and chains of *removal*. Raises HostError."""
    for text in restore_inputs(removal, tables.chains_per_call):
        tables.restore(text)

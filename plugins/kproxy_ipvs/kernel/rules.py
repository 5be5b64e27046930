"""Reading the iptables rules of one IP family."""

from kproxy_ipvs.batch.rules import TABLES
from kproxy_xtables.rules import ChainKey
from kproxy_xtables.tables import Tables


def read(tables: Tables) -> dict[ChainKey, list[str]]:
    """Return all chains with their rules, of the tables that this mode uses. Raises HostError."""
    return {(saved.table, saved.name): saved.rules for saved in tables.save() if saved.table in TABLES}

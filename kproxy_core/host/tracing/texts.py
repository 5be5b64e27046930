"""The texts of rules by their handles, as nft prints them."""

import re

from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.tracing.events import TraceEvent

_TABLE = re.compile(r"^table (\S+) (\S+) \{(.*?)^\}", re.DOTALL | re.MULTILINE)
_CHAIN = re.compile(r"^\tchain (\S+) \{(.*?)^\t\}", re.DOTALL | re.MULTILINE)
_RULE = re.compile(r"^\t\t(.+) # handle (\d+)$", re.MULTILINE)
_WITHOUT_SETS = frozenset({"filter", "nat", "mangle", "raw", "security"})

_Place = tuple[str, str, str]
"""Family, table and chain."""


class RuleTexts:
    """Texts of rules, which are listed when one of them is asked for."""

    def __init__(self) -> None:
        self._chains: dict[_Place, dict[int, str]] = {}
        self._has_nft = bool(programs.find("nft"))

    def text(self, rule: TraceEvent) -> str:
        """Return the text of *rule*; its handle if nft is not installed or the rule is gone."""
        if not rule.handle:
            return "the chain's policy"
        place = rule.family, rule.table, rule.chain
        if place not in self._chains:
            self._chains |= {place: {}} | self._list(place)
        return self._chains[place].get(rule.handle, f"handle {rule.handle}")

    def _list(self, place: _Place) -> dict[_Place, dict[int, str]]:
        """Return the rules of a chain, and of others if one command lists these as well.

        Tables of iptables have many rules and no sets, so their chains are listed one by one. For another
        table nft before 1.1.0 would read all elements of its sets, unless it lists every table.
        """
        if not self._has_nft:
            return {}
        what = ("chain", *place) if place[1] in _WITHOUT_SETS else ("ruleset", place[0])
        try:
            listed = programs.run("nft", "-a", "-s", "-t", "list", *what).stdout
        except HostError:
            return {}
        return {
            (family, table, chain): {int(handle): text for text, handle in _RULE.findall(rules)}
            for family, table, chains in _TABLE.findall(listed)
            for chain, rules in _CHAIN.findall(chains)
        }

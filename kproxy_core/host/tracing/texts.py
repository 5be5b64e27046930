"""The texts of rules by their handles, as nft prints them."""

import re
from typing import Final

from kproxy_core.host.errors import HostError
from kproxy_core.host.libnftables.texts import Listing, Refused, Style, list_chain, list_tables
from kproxy_core.host.tracing.events import TraceEvent

_TABLE = re.compile(r"^table (\S+) (\S+) \{(.*?)^\}", re.DOTALL | re.MULTILINE)
_CHAIN = re.compile(r"^\tchain (\S+) \{(.*?)^\t\}", re.DOTALL | re.MULTILINE)
_RULE = re.compile(r"^\t\t(.+) # handle (\d+)$", re.MULTILINE)
_STYLE: Final[tuple[Style, ...]] = ("handle_output", "stateless_output", "terse_output")
_WITHOUT_SETS = frozenset({"filter", "nat", "mangle", "raw", "security"})

_Place = tuple[str, str, str]
"""Family, table and chain."""


class RuleTexts:
    """Texts of rules, which are listed when one of them is asked for."""

    def __init__(self) -> None:
        self._chains: dict[_Place, dict[int, str]] = {}
        self.problems: list[str] = []
        """The reasons why rules are known by their handles only."""

    def text(self, rule: TraceEvent) -> str:
        """Return the text of *rule*; its handle if the rule is gone or cannot be listed."""
        if not rule.handle:
            return "the chain's policy"
        place = rule.family, rule.table, rule.chain
        if place not in self._chains:
            self._chains |= {place: {}} | self._list(place)
        return self._chains[place].get(rule.handle, f"handle {rule.handle}")

    def _list(self, place: _Place) -> dict[_Place, dict[int, str]]:
        """Return the rules of a chain, and of others if one command lists these as well.

        Tables of iptables have many rules and no sets, so their chains are listed one by one.
        """
        try:
            text, unread = self._listed(place)
        except HostError as error:
            text, unread = "", (str(error),)
        self.problems += [problem for problem in unread if problem not in self.problems]
        return {
            (family, table, chain): {int(handle): text for text, handle in _RULE.findall(rules)}
            for family, table, chains in _TABLE.findall(text)
            for chain, rules in _CHAIN.findall(chains)
        }

    @staticmethod
    def _listed(place: _Place) -> Listing:
        if place[1] not in _WITHOUT_SETS:
            return list_tables(place[0], _STYLE)
        try:
            return Listing(list_chain(*place, _STYLE), ())
        except Refused:  # The chain is gone.
            return Listing("", ())

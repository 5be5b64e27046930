"""The texts of rules by their handles, as nft prints them."""

import re

from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.tracing.packets import Rule

_RULE = re.compile(r"\s*(.+) # handle (\d+)")


class RuleTexts:
    """Texts of rules. Each chain is listed once, when one of its rules is asked for."""

    def __init__(self) -> None:
        self._chains: dict[tuple[str, str, str], dict[int, str]] = {}
        self._has_nft = bool(programs.find("nft"))

    def text(self, rule: Rule) -> str:
        """Return the text of *rule*; its handle if nft is not installed or the rule is gone."""
        if not rule.handle:
            return "the chain's policy"
        place = rule.family, rule.table, rule.chain
        if place not in self._chains:
            self._chains[place] = self._list(place)
        return self._chains[place].get(rule.handle, f"handle {rule.handle}")

    def _list(self, place: tuple[str, str, str]) -> dict[int, str]:
        if not self._has_nft:
            return {}
        try:
            listed = programs.run("nft", "-a", "-s", "-t", "list", "chain", *place).stdout
        except HostError:
            return {}
        found = filter(None, map(_RULE.fullmatch, listed.splitlines()))
        return {int(rule[2]): rule[1] for rule in found}

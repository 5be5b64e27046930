"""Deletions by other programs are noticed at once and repaired: of each jump, and of rules in each chain."""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from kproxy_conformance.checks.bench import lonely_node
from kproxy_conformance.checks.features import everything
from kproxy_conformance.checks.subject import Subject, Wanted, full
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.model.address import Family
from tests.patience import PATIENCE

Json = dict[str, Any]

BUILT_IN = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_OF_SERVICE = re.compile(r"-[A-Z0-9]{8}|-\d")


@pytest.fixture
def instance(mode: str, family: Family) -> Iterator[BackendInstance]:
    """A backend on a node of its own, which compares nothing with the kernel unless it is told to."""
    with lonely_node():
        subject = Subject(Wanted(mode, options={"syncPeriod": "1h"}), (family,))
        try:
            yield subject.start()
        finally:
            subject.end_all()
            subject.cleanup()


def rules() -> dict[str, str]:
    """Return the deletion of each rule of the node, by what the rule is and its number among equal ones."""
    done = subprocess.run(["nft", "-j", "-a", "list", "ruleset"], capture_output=True, text=True, check=True)
    listed = [item["rule"] for item in json.loads(done.stdout)["nftables"] if "rule" in item]
    seen: Counter[str] = Counter()
    found = {}
    for rule in listed:
        at = f"{rule['family']} {rule['table']} {rule['chain']}"
        meaning = f"{at} {json.dumps(_without_counts(rule['expr']))}"
        found[f"{meaning} {seen[meaning]}"] = f"delete rule {at} handle {rule['handle']}"
        seen[meaning] += 1
    return found


def one_of_each_kind(rules: Iterable[str]) -> list[str]:
    """Return one rule of each chain, of each kind if they belong to Services, and all of built-in chains."""
    found: dict[str, str] = {}
    for rule in rules:
        table, chain = rule.split()[1:3]
        kind = rule if chain in BUILT_IN else f"{table} {_OF_SERVICE.split(chain)[0]}"
        found.setdefault(kind, rule)
    return list(found.values())


def _without_counts(value: object) -> object:
    """Return a part of a rule without handles and counted packets."""
    if isinstance(value, dict):
        return {name: None if name == "counter" else _without_counts(part) for name, part in value.items()}
    return [_without_counts(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
@pytest.mark.parametrize("mode", ["nftables", "iptables", "userspace"])
def test_the_deletion_of_a_rule_is_reported_and_repaired(
    mode: str, family: Family, instance: BackendInstance
) -> None:
    plans = everything(family)
    full(instance, family, plans)
    reports: SimpleQueue[tuple[Family, str]] = SimpleQueue()
    assert instance.watch(lambda of, what: reports.put((of, what)))
    wanted = rules()
    for rule in one_of_each_kind(wanted):
        subprocess.run(["nft", rules()[rule]], check=True)
        assert reports.get(timeout=PATIENCE)[0] is family, rule
        full(instance, family, plans)
    assert rules().keys() == wanted.keys()
    assert reports.empty()

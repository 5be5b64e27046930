"""Changes of large service ports in parts. Pure."""

import re

import pytest

from kproxy_conformance.builders import endpoint_slice, node_view, plans, service
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_iptables.applied import MOST_DELETED, MOST_LINES, Applied
from kproxy_iptables.batch import deletions, inputs
from kproxy_iptables.names import is_service_chain
from kproxy_iptables.skeleton import Facts
from kproxy_iptables.wanted import MOST_IN_CHAIN, make_style, wanted
from kproxy_xtables.tables import CHAINS_PER_CALL

NODE = node_view(pods="10.244.0.0/16", anywhere=True)
FACTS = Facts()
COMMENT = re.compile(r'-m comment --comment "[^"]*" ')
"""Chains keep those that they have when endpoints become so many that others have none."""


class Nat:
    """The nat table."""

    def __init__(self) -> None:
        self.applied = Applied()
        self.chains: dict[str, list[str]] = {"KUBE-SERVICES": [], "KUBE-MARK-MASQ": []}
        self.longest = 0
        """Most lines of a change."""

    def change(self, key: ServicePortKey, plan: ServicePlan | None) -> bool:
        """Do as `FamilyState.change`. Return whether the change is complete."""
        found = self.applied.difference({key: plan}, NODE, FACTS)
        late: list[str] = []
        if len(found.references.stale) > CHAINS_PER_CALL:
            found.references.stale, late = late, found.references.stale
        texts = [*inputs(found.chains, lambda: found.references, chains_per_call=CHAINS_PER_CALL),
                 *deletions(late, CHAINS_PER_CALL)]
        for text in texts:
            self.restore(text)
        self.longest = max(self.longest, sum(text.count("\n-") for text in texts))
        self.applied.acknowledge(found)
        return not any(found.prepared.values())

    def restore(self, text: str) -> None:
        for line in text.partition("*nat\n")[2].partition("COMMIT")[0].splitlines():
            if line.startswith(":"):
                self.chains[line[1:].split()[0]] = []
                continue
            command, chain, *rest = line.split(" ", 2)
            if command == "-X":
                del self.chains[chain]
            elif command == "-D":
                self.chains[chain].remove(rest[0])
            else:
                self.chains[chain].insert(len(self.chains[chain]) if command == "-A" else 0, rest[0])
        for name, rules in self.chains.items():
            for rule in rules:
                (target,) = re.findall(r"-j (\S+)", rule)
                assert target in self.chains or not target.startswith("KUBE-"), f"{name}: {rule}"
                assert not target.startswith(("KUBE-SVC-", "KUBE-SEP-")) or self.chains[target], "a gap"

    def of_services(self) -> dict[str, str]:
        return {name: "".join(f"-A {name} {COMMENT.sub('', rule)}\n" for rule in rules)
                for name, rules in self.chains.items() if is_service_chain("nat", name)}


def planned(count: int) -> tuple[ServicePortKey, ServicePlan]:
    pods = [f"10.{at // 65025}.{at // 255 % 255}.{at % 255}" for at in range(count)]
    ((key, plan),) = plans(NODE, service("web", affinity=60), endpoint_slice("web", *pods)).items()
    return key, plan


def expected(plan: ServicePlan | None) -> dict[str, str]:
    chains = wanted(plan, make_style(NODE, FACTS, len(plan.reachable))).chains if plan else {}
    return {name: COMMENT.sub("", body) for name, body in chains.items()}


def finish(nat: Nat, key: ServicePortKey, plan: ServicePlan | None) -> int:
    for number in range(1, 1000):
        if nat.change(key, plan):
            assert nat.of_services() == expected(plan)
            assert not nat.applied.prepared
            return number
    raise AssertionError("no end")


COUNTS = [0, 300, 2500]


@pytest.mark.parametrize("before", COUNTS)
@pytest.mark.parametrize("after", COUNTS)
@pytest.mark.parametrize("parts", [0, 2])
def test_a_change_in_parts_ends_as_it_should(before: int, after: int, parts: int) -> None:
    """*parts* of a change to 3,000 endpoints are written in between."""
    nat, key = Nat(), planned(1)[0]
    old, new = (planned(count)[1] if count else None for count in (before, after))
    finish(nat, key, old)
    for _ in range(parts):
        nat.change(*planned(3000))
    finish(nat, key, new)
    assert nat.longest <= MOST_LINES + 5 * MOST_IN_CHAIN + 2 * MOST_DELETED


@pytest.mark.parametrize(("count", "is_large"), [(1, False), (300, False), (3000, True)])
def test_only_a_large_change_is_written_in_parts(count: int, is_large: bool) -> None:
    nat = Nat()
    key, plan = planned(count)
    assert (finish(nat, key, plan) > 1) is is_large
    _, more = planned(count + 1)
    assert finish(nat, key, more) == 1

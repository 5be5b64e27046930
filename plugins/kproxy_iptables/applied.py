"""The state that the kernel has acknowledged for one family, and the difference to the wanted state. Pure.

Only an acknowledgement changes `Applied`. It holds just the plan of a service port: the chains and rules are
computed again when the plan changes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from kproxy_core.contract import NodeView, ServicePlan, ServicePortKey
from kproxy_iptables import names
from kproxy_iptables.batch import References, Section
from kproxy_iptables.names import FILTER, NAT
from kproxy_iptables.skeleton import ALL_JUMPS, BLOCK_LOCALNET, Facts, skeleton
from kproxy_iptables.wanted import DispatchRule, Style, Wanted, make_style, wanted
from kproxy_xtables.rules import MANY_DELETIONS, ChainKey, append_commands, has_rule, missing_jumps

Plans = Mapping[ServicePortKey, ServicePlan]
_EMPTY = Wanted({}, [])
MOST_LINES = 2_000
"""Limit for the rules in chains of one service port that a change writes at once: about half a second."""
MOST_DELETED = 1_000
"""The same for the chains of endpoints that it deletes."""
_CHAINS = "chains of service ports"
"""Key beside the tables in counts of rules."""


@dataclass(slots=True)
class Observed:
    """The contents of the kernel's tables, as iptables-save prints them."""

    chains: dict[ChainKey, list[str]] = field(default_factory=dict)
    """Rules of the fixed chains and the canaries, and those rules of other chains that jump to a chain of
    Kubernetes."""
    service_chains: dict[str, int] = field(default_factory=dict)
    """Fingerprints of the chains of service ports."""


def fingerprint(rules: str) -> int:
    """Return a number for the rules of one chain, given as complete lines. Valid within this process."""
    return hash(rules)


@dataclass(slots=True)
class Difference:
    """The operations that bring the kernel to changed plans."""

    chains: list[tuple[str, str]]
    references: References
    plans: Mapping[ServicePortKey, ServicePlan | None]
    rules: Counter[str]
    """Growth of the number of rules by table, and of those in chains of service ports."""
    chain_rules: int
    """Number of rules in the chains of the changed service ports."""
    endpoints: int
    """Number of endpoints afterwards."""
    prepared: dict[ServicePortKey, dict[str, int]]
    """`Applied.prepared` of the changed service ports afterwards."""
    incomplete: Set[ServicePortKey]
    """Service ports of which only chains are written to which nothing jumps that is new."""


class Applied:
    """The acknowledged state of one family."""

    def __init__(self) -> None:
        self.plans: dict[ServicePortKey, ServicePlan] = {}
        self.endpoints = 0
        """See `count_endpoints`."""
        self.prepared: dict[ServicePortKey, dict[str, int]] = {}
        """Fingerprints of the chains of service ports that are not as in `plans`, because a change is written
        in parts; 0: a chain that is to be deleted."""
        self.rules: Counter[str] = Counter()
        """Number of rules by table, and in chains of service ports."""

    def last_rules(self, difference: Difference | None = None) -> dict[str, int]:
        """Return the number of rules that kube-proxy would write in a sync, by table.

        With a *difference*, without the chains of unchanged service ports.
        """
        unchanged = 0 if difference is None else self.rules[_CHAINS] - difference.chain_rules
        return {FILTER: self.rules[FILTER], NAT: self.rules[NAT] - unchanged}

    def difference(
        self, changed: Mapping[ServicePortKey, ServicePlan | None], node: NodeView, facts: Facts
    ) -> Difference:
        """Return the operations that bring the kernel to the *changed* plans, or nearer. O(changed)."""
        growths = {key: _endpoints(plan) - _endpoints(self.plans.get(key)) for key, plan in changed.items()}
        style = make_style(node, facts, self.endpoints + sum(growths.values()))
        prepared: dict[ServicePortKey, dict[str, int]] = {}
        incomplete: set[ServicePortKey] = set()
        chains: dict[str, str] = {}
        stale: dict[str, None] = {}
        growth: Counter[str] = Counter()
        chain_rules = 0
        removed: list[DispatchRule] = []
        added: list[DispatchRule] = []
        for key, plan in changed.items():
            old = self.plans.get(key)
            before = wanted(old, style) if old else _EMPTY
            after = wanted(plan, style) if plan else _EMPTY
            written = self.prepared.get(key, {})
            missing = {
                name: body for name, body in after.chains.items()
                if (written[name] != fingerprint(body) if name in written
                    else before.chains.get(name) != body)}  # fmt: skip
            part = _first(missing)
            chains |= part
            if len(part) < len(missing):
                prepared[key] = written | {name: fingerprint(body) for name, body in part.items()}
                incomplete.add(key)
                continue
            gone = [name for name in {**before.chains, **written} if name not in after.chains]
            of_endpoints = [name for name in gone if name.startswith(names.ENDPOINT_PREFIX)]
            prepared[key] = dict.fromkeys(of_endpoints[MOST_DELETED:], 0)
            stale.update((name, None) for name in gone if name not in prepared[key])
            unchanged = {*before.rules}.intersection(after.rules)
            removed += [rule for rule in before.rules if rule not in unchanged]
            added += [rule for rule in after.rules if rule not in unchanged]
            counted = _count(after)
            chain_rules += counted[_CHAINS]
            growth.update(counted)
            growth.subtract(_count(before))
        references = References(stale=[name for name in stale if name not in chains])
        deletions = Counter((table, chain) for table, chain, _ in removed)
        rewritten = {chain for chain, number in deletions.items() if number > MANY_DELETIONS}
        for table, chain, spec in removed:
            if (table, chain) not in rewritten:
                section = references.late if table == FILTER else references.sections[NAT]
                section.lines.append(f"-D {chain} {spec}")
        if rewritten:
            complete = {key: plan for key, plan in changed.items() if key not in incomplete}
            self._rewrite(rewritten, complete, references, style, skeleton(node, facts))
            added = [rule for rule in added if (rule.table, rule.chain) not in rewritten]
        # At the top, because the last rule of KUBE-SERVICES must remain the last. In reverse order, because
        # the localhost rule of a node port must stand before the general one.
        for table, chain, spec in reversed(added):
            references.sections[table].lines.append(f"-I {chain} {spec}")
        endpoints = self.endpoints + sum(more for key, more in growths.items() if key not in incomplete)
        return Difference(
            list(chains.items()), references, changed, growth, chain_rules, endpoints, prepared, incomplete)

    def _rewrite(
        self, rewritten: Set[ChainKey], changed: Mapping[ServicePortKey, ServicePlan | None],
        references: References, style: Style, constant: Mapping[ChainKey, Sequence[str]],
    ) -> None:
        """Replace chains outside those of service ports. O(all service ports)."""
        sections: dict[ChainKey, Section] = {}
        for table, chain in sorted(rewritten):
            section = references.late if table == FILTER else references.sections[NAT]
            section.chains.append(chain)
            sections[table, chain] = section
        for plan in {**self.plans, **changed}.values():
            for table, chain, spec in wanted(plan, style).rules if plan else ():
                if (table, chain) in sections:
                    sections[table, chain].lines.append(f"-A {chain} {spec}")
        for key, section in sections.items():
            section.lines += [f"-A {key[1]} {spec}" for spec in constant[key]]

    def acknowledge(self, difference: Difference) -> None:
        self.prepared = {key: held for key, held in (self.prepared | difference.prepared).items() if held}
        for key, plan in difference.plans.items():
            if key in difference.incomplete:
                continue
            if plan is None:
                self.plans.pop(key, None)
            else:
                self.plans[key] = plan
        self.rules.update(difference.rules)
        self.endpoints = difference.endpoints


class FullDifference:
    """The difference between all plans and a fresh read of the kernel, computed while it is written.

    `chains` must be exhausted before `references` and `stale` are used.
    """

    def __init__(self, observed: Observed, plans: Plans, node: NodeView, facts: Facts) -> None:
        self._observed = observed
        self._plans = plans
        self._constant = skeleton(node, facts)
        self._style = make_style(node, facts, count_endpoints(plans))
        self._facts = facts
        self._rules: dict[ChainKey, list[str]] = {}
        self.stale = dict.fromkeys(observed.service_chains)
        """Chains of service ports that no plan wants."""
        self.operations = 0
        """Number of chains and rules returned by `chains` and `references` so far."""
        self._counts: Counter[str] = Counter()

    def chains(self) -> Iterator[tuple[str, str]]:
        """Yield name and rules of each chain of a service port that is missing or differs.

        KUBE-MARK-MASQ, to which all of them jump, precedes them if it differs.
        """
        marking = self._constant[NAT, names.MARK_MASQ]
        if self._observed.chains.get((NAT, names.MARK_MASQ)) != marking:
            yield names.MARK_MASQ, append_commands(names.MARK_MASQ, marking)
        held = self._observed.service_chains
        for plan in self._plans.values():
            want = wanted(plan, self._style)
            for table, chain, spec in want.rules:
                self._rules.setdefault((table, chain), []).append(spec)
            self._counts.update(_count(want))
            for name, body in want.chains.items():
                self.stale.pop(name, None)
                if held.get(name) != fingerprint(body):
                    self.operations += 1
                    yield name, body

    def references(self) -> References:
        """Return the differences outside the chains of service ports."""
        held = self._observed.chains
        result = References()
        for key, last in self._constant.items():
            table, chain = key
            rules = self._rules.get(key, [])
            if key != (NAT, names.MARK_MASQ) and not _is_equivalent(held.get(key), rules, last):
                section = result.sections[table]
                section.chains.append(chain)
                section.lines += [f"-A {chain} {spec}" for spec in (*rules, *last)]
        kubelets = held.get((FILTER, names.KUBELET_FIREWALL))
        if kubelets is None:
            result.sections[FILTER].chains.append(names.KUBELET_FIREWALL)
        if self._facts.localhost_node_ports and not has_rule(kubelets or (), BLOCK_LOCALNET):
            result.sections[FILTER].lines.append(f"-A {names.KUBELET_FIREWALL} {BLOCK_LOCALNET}")
        for jump in missing_jumps(ALL_JUMPS, held):
            result.sections[jump.table].lines.append(jump.command)
        for table in names.TABLES:
            if (table, names.CANARY) not in held:
                result.sections[table].chains.append(names.CANARY)
        self.operations += result.operations
        return result

    def acknowledged(self) -> Applied:
        """Return the state once the kernel has accepted everything."""
        applied = Applied()
        applied.plans = dict(self._plans)
        applied.endpoints = count_endpoints(self._plans)
        applied.rules = self._counts
        for (table, _), rules in self._constant.items():
            applied.rules[table] += len(rules)
        return applied


def owner_of(line: str, plans: Plans, style: Style) -> ServicePortKey | None:
    """Return the service port that wants the rule in *line*, an ``-A`` command; None for a constant rule."""
    for key, plan in plans.items():
        want = wanted(plan, style)
        if any(f"{line}\n" in body for body in want.chains.values()):
            return key
        if any(line == f"-A {rule.chain} {rule.spec}" for rule in want.rules):
            return key
    return None


def count_endpoints(plans: Plans) -> int:
    return sum(map(_endpoints, plans.values()))


def _first(chains: Mapping[str, str]) -> dict[str, str]:
    """Return the first of *chains*, with at most `MOST_LINES` rules unless the first one has more."""
    found: dict[str, str] = {}
    lines = 0
    for name, body in chains.items():
        lines += body.count("\n")
        if found and lines > MOST_LINES:
            break
        found[name] = body
    return found


def _endpoints(plan: ServicePlan | None) -> int:
    return len(plan.reachable) if plan else 0


def _count(want: Wanted) -> dict[str, int]:
    """Return the number of rules in *want* by table, and of those in its own chains."""
    refusals = sum(rule.table == FILTER for rule in want.rules)
    own = sum(body.count("\n") for body in want.chains.values())
    return {NAT: own + len(want.rules) - refusals, FILTER: refusals, _CHAINS: own}


def _is_equivalent(held: list[str] | None, rules: list[str], last: list[str]) -> bool:
    """Return whether a chain holds *rules* in any order, followed by *last*."""
    if held is None or held[len(rules) :] != last:
        return False
    return held[: len(rules)] == rules or Counter(held[: len(rules)]) == Counter(rules)

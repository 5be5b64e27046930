"""Packets that go astray, each of which one check of the kit must notice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kproxy_core.backend.api import (
    Connections,
    Leftovers,
    Update,
)
from kproxy_core.backend.hookspecs import hookimpl
from kproxy_core.model.address import Protocol, parse_address
from kproxy_core.plan.service_plan import ServicePlan
from tests.kit.sabotage import Sabotage, nft


class OtherPlans(Sabotage):
    """Serves something else than what was asked for."""

    def __init__(
        self, name: str, check: str, words: str, change: Callable[[ServicePlan], ServicePlan]
    ) -> None:
        self.name, self.check, self.words = name, check, words
        self._change = change

    def __str__(self) -> str:
        return self.name

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        for plans in (update.plans, update.changed):
            assert isinstance(plans, dict)
            for key, plan in plans.items():
                plans[key] = plan and self._change(plan)


class OtherRules(Sabotage):
    """Adds rules of its own to those of a Service of some kind."""

    def __init__(
        self, name: str, check: str, words: str, when: Callable[[ServicePlan], object], rules: str
    ) -> None:
        self.name, self.check, self.words = name, check, words
        self._when, self._rules = when, rules

    def __str__(self) -> str:
        return self.name

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        if any(map(self._when, update.plans.values())):
            nft(f"table ip sabotage {{ {self._rules} }}")


class LosesConnections(Sabotage):
    check, words = "counts-each-connection-once", r"kproxy_traffic returned \{\} for"

    @hookimpl(tryfirst=True)
    def kproxy_traffic(self) -> list[Connections]:
        return []


class MasqueradesPods(Sabotage):
    check, words = "pods-see-the-client-pod", "sees a client node, not the pod"

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        object.__setattr__(update, "node", replace(update.node, masquerade_all=True))


class KeepsOldEndpoints(Sabotage):
    check, words = "endpoints-that-go-get-no-new-connections", "answered by far, near, other, not by"

    def __init__(self) -> None:
        self._before: ServicePlan | None = None

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        for key, plan in update.plans.items():
            before, self._before = self._before, plan
            if before is not None and len(before.cluster) == len(plan.cluster) == 2:
                kept = replace(plan, cluster=(*before.cluster, *plan.cluster))
                update.plans[key] = update.changed[key] = kept  # type: ignore[index]


class KeepsDeletedServices(Sabotage):
    check, words = "deleted-service-is-not-served", "near answers, and must not"

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        for key in [key for key, plan in update.changed.items() if plan is None]:
            del update.changed[key]  # type: ignore[attr-defined]


class TakesAllAlong(Sabotage):
    check, words = "restart-goes-unnoticed", "from near to TCP 10.96.0.1:80"

    @hookimpl(tryfirst=True)
    def kproxy_close(self) -> None:
        nft("delete table ip kproxy-plain")


class CutsWhenRetiring(Sabotage):
    check, words = "retiring-cuts-no-connection", "an established connection was cut"

    @hookimpl
    def kproxy_retire(self) -> Leftovers:
        nft("table ip cut { chain c { type filter hook forward priority 0; ct state established drop; }; }")
        return Leftovers("plain")


def _only_cluster_ip(plan: ServicePlan) -> bool:
    return not plan.node_port and not plan.external_addresses and not plan.internal_policy_local


def _fewer(protocol: Protocol) -> Callable[[ServicePlan], ServicePlan]:
    def fewer(plan: ServicePlan) -> ServicePlan:
        three = _only_cluster_ip(plan) and plan.key.protocol is protocol and len(plan.cluster) == 3
        return replace(plan, cluster=plan.cluster[:2]) if three else plan

    return fewer


def _if(when: Callable[[ServicePlan], object], **changes: Any) -> Callable[[ServicePlan], ServicePlan]:
    return lambda plan: replace(plan, **changes) if when(plan) else plan


def _drop(hook: str, match: str) -> str:
    return f"chain {hook} {{ type filter hook {hook} priority -300; {match} drop; }};"


def _external_only(plan: ServicePlan) -> bool:
    return bool(plan.external_ips and plan.has_endpoints and not plan.node_port)


FAR = "10.1.2.11"

PACKETS: tuple[Sabotage, ...] = (
    OtherPlans(
        "FewerEndpoints",
        "cluster-ip-reaches-every-endpoint",
        "answered by .*, not by near, other, far",
        _fewer(Protocol.TCP),
    ),
    OtherPlans(
        "FewerOfUdp",
        "udp-reaches-every-endpoint",
        "answered by .*, not by near, other, far",
        _fewer(Protocol.UDP),
    ),
    OtherPlans(
        "NoHairpin",
        "a-pod-reaches-itself",
        "from near to TCP 10.96.0.1:80: no answer",
        _if(lambda plan: len(plan.cluster) == 1, hairpins=()),
    ),
    OtherPlans(
        "NoUdpNodePort",
        "node-port-serves-clients-outside",
        "to UDP 172.30.0.1:30053: Connection refused",
        _if(lambda plan: plan.node_port == 30053, node_port=0),
    ),
    OtherPlans(
        "NoBalancer",
        "load-balancer-ip-serves-clients-outside",
        "to TCP 203.0.113.2:80: no answer",
        _if(lambda plan: not plan.external_policy_local and not plan.source_ranges, load_balancer_ips=()),
    ),
    OtherPlans(
        "SilentWithoutEndpoints",
        "no-endpoints-refuses",
        "where it must be refused",
        _if(lambda plan: not plan.cluster, has_endpoints=True),
    ),
    OtherPlans(
        "NoInternalPolicy",
        "internal-policy-local-stays-on-the-node",
        "from near to TCP 10.96.0.1:80: no answer",
        _if(lambda plan: True, internal_policy_local=False),
    ),
    OtherRules(
        "NodeKeptOut",
        "external-ip-serves-the-node",
        "from node to TCP 203.0.113.1:80",
        _external_only,
        _drop("output", "ip daddr 203.0.113.1"),
    ),
    KeepsDeletedServices(),
    KeepsOldEndpoints(),
    TakesAllAlong(),
)
MORE_PACKETS: tuple[Sabotage, ...] = (
    LosesConnections(),
    MasqueradesPods(),
    CutsWhenRetiring(),
    OtherPlans(
        "AnyClient",
        "source-ranges-keep-others-out",
        "from 198.51.100.8 .* answers, and must not",
        _if(lambda plan: True, source_ranges=()),
    ),
    OtherPlans(
        "OneForBoth",
        "two-protocols-share-a-port",
        "UDP .*answered by near, not by other",
        lambda plan: (
            replace(plan, cluster=(plan.cluster[0]._replace(address=parse_address("10.1.1.11")),))
            if plan.node_port == 30081
            else plan
        ),
    ),
    OtherRules(
        "OutsideKeptOut",
        "external-ip-serves-clients-outside",
        "to TCP 203.0.113.1:80: no answer",
        _external_only,
        _drop("prerouting", "iifname wan ip daddr 203.0.113.1"),
    ),
    OtherPlans(
        "HidesClients",
        "external-policy-local-keeps-the-client-address",
        "is answered by far|endpoint sees",
        _if(lambda plan: plan.local, external_policy_local=False),
    ),
    OtherPlans(
        "Elsewhere",
        "external-policy-local-without-local-endpoints-is-silent",
        "far answers, and must not",
        _if(lambda plan: not plan.local, external_policy_local=False),
    ),
)

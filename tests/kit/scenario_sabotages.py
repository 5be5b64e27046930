"""Backends that send packets astray, each of which one scenario must notice."""

from collections.abc import Callable
from typing import Any

from msgspec import structs
from msgspec.structs import force_setattr, replace

from kproxy_core.contract import KernelSide, Leftovers, Update, hookimpl
from kproxy_core.model.address import Protocol
from kproxy_core.plan.fate import Fate, Outcome
from kproxy_core.plan.service_plan import ServicePlan
from tests.kit.sabotage import Sabotage, nft

Change = Callable[[ServicePlan], ServicePlan]


class OtherPlans(Sabotage):
    """Serves other plans than it is given, but for the Service that the player waits for."""

    def __init__(self, name: str, check: str, words: str, change: Change) -> None:
        self.name, self.check, self.words = name, check, words
        self._change = change

    def __str__(self) -> str:
        return self.name

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        for name, plans in (("plans", update.plans), ("changed", update.changed)):
            force_setattr(update, name, {
                key: self._change(plan) if plan and key.namespace == "default" else plan
                for key, plan in plans.items()
            })  # fmt: skip


class LosesConnections(Sabotage):
    check, words = "counted-connections", "the backend counted {}"

    def spoil(self, backend: Any) -> None:
        backend.traffic = lambda family: []


class MasqueradesPods(Sabotage):
    check, words = "clusterip-udp", "expected the source to be preserved"

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        force_setattr(update, "node", replace(update.node, masquerade_all=True))


class KeepsDeletedServices(Sabotage):
    check, words = "one-address-twice", "expected every attempt to be unanswered"

    @hookimpl(tryfirst=True)
    def kproxy_sync(self, update: Update) -> None:
        force_setattr(update, "changed", {key: plan for key, plan in update.changed.items() if plan})


class TakesAllAlong(Sabotage):
    check, words = "proxy-restart", "expected every attempt to be reached"

    def spoil(self, backend: Any) -> None:
        backend.close = lambda: nft("delete table ip kproxy-plain")


class CutsWhenRetiring(Sabotage):
    check, words = "retire", "expected every attempt to be reached"

    @hookimpl
    def kproxy_retire(self) -> Leftovers:
        nft("table ip cut { chain c { type filter hook forward priority 0; ct state established drop; }; }")
        return Leftovers()


class ExplainsWrongly(Sabotage):
    check, words = "external-ip", "kproxy explain .* refused, and attempts are reached"

    def spoil(self, backend: Any) -> None:
        backend.explain = lambda questions, *, live: [
            KernelSide((), Fate(Outcome.REFUSED, "")) for _ in questions]


def _but(**changes: Any) -> Change:
    return lambda plan: structs.replace(plan, **changes)


def _fewer(protocol: Protocol) -> Change:
    return lambda plan: (
        structs.replace(plan, cluster=plan.cluster[:-1]) if plan.key.protocol is protocol else plan)


def _first_endpoints() -> Change:
    """Keep the endpoints that a service port had first."""
    first: dict[object, Any] = {}
    return lambda plan: structs.replace(plan, cluster=first.setdefault(plan.key, plan.cluster))


SCENARIOS: tuple[Sabotage, ...] = (
    OtherPlans("FewerOfTcp", "clusterip-tcp", "reached only 3 of the 4", _fewer(Protocol.TCP)),
    OtherPlans("FewerOfUdp", "clusterip-udp", "reached only 1 of the 2", _fewer(Protocol.UDP)),
    OtherPlans("NoHairpin", "hairpin", "expected every attempt to be reached", _but(hairpins=())),
    OtherPlans("NoNodePort", "nodeport-etp-local", "x refused", _but(node_port=0)),
    OtherPlans("NoExternalIp", "external-ip", "x dropped", _but(external_ips=())),
    OtherPlans("NoBalancer", "loadbalancer-cluster", "x dropped", _but(load_balancer_ips=())),
    OtherPlans("NeverEmpty", "no-endpoints-refused", "expected every attempt to be refused",
               _but(has_endpoints=True)),
    OtherPlans("AnyClient", "loadbalancer-source-ranges", "expected every attempt to be dropped",
               _but(source_ranges=())),
    OtherPlans("HidesClients", "loadbalancer-local", r"reached \['pod3'\]",
               _but(external_policy_local=False)),
    OtherPlans("Elsewhere", "nodeport-etp-local-none", "expected every attempt to be dropped",
               _but(external_policy_local=False)),
    OtherPlans("NoInternalPolicy", "internal-policy-local", r"reached \['pod3'\]",
               _but(internal_policy_local=False)),
    OtherPlans("OldEndpoints", "one-address-twice", r"reached \['pod1'\]", _first_endpoints()),
    OtherPlans("NoAddress", "clusterip-tcp-and-udp-on-one-port", "x dropped", _but(cluster_ip=None)),
    OtherPlans("NoWeights", "weights", r"got \d+ of 400, expected 75 %", _but(cluster_weights=())),
    LosesConnections(),
    MasqueradesPods(),
    KeepsDeletedServices(),
    TakesAllAlong(),
    CutsWhenRetiring(),
    ExplainsWrongly(),
)  # fmt: skip

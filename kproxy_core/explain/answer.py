"""The answer for one packet, as values that JSON can hold."""

from collections.abc import Sequence
from typing import Any

from kproxy_core.backend.api import Caveat, KernelSide
from kproxy_core.explain.question import Case
from kproxy_core.explain.verdict import UNKNOWN, judge
from kproxy_core.model.address import format_address, format_socket
from kproxy_core.model.endpoint import Endpoint
from kproxy_core.model.node import NodeView
from kproxy_core.plan.fate import Fate, Outcome, Packet, Policy, decide, decide_unowned, kind_of

Json = dict[str, Any]


def decide_case(case: Case) -> Fate:
    """Return the fate that the plans give the packet of *case*."""
    question = case.question
    if question.plan is None or question.frontend is None:
        return decide_unowned(question.packet, case.has_cluster_ip, question.node)
    return decide(question.packet, question.frontend, question.plan, question.node, question.addresses)


def answer(
    case: Case, side: KernelSide | None, *, mode: str, live: bool, caveats: Sequence[Caveat] = ()
) -> Json:
    """Return the whole answer for the packet of *case*. *side* None: the mode cannot show its objects."""
    question, fate = case.question, decide_case(case)
    packet, node, frontend, plan = question.packet, question.node, question.frontend, question.plan
    found: Json = {
        "from": format_address(packet.source),
        "origin": packet.origin.value,
        "typical_sender": case.is_typical,
        "to": format_socket(packet.destination, packet.port),
        "protocol": packet.protocol.name,
        "frontend": None,
        "outcome": fate.outcome.value,
        "because": fate.because,
        "policy": fate.policy.value if fate.policy else "",
        "endpoints": _endpoints(fate),
        "not_chosen": [],
        "source": "",
        "near": case.near,
        "affinity": None,
        "caveats": [caveat.what for caveat in caveats],
    }  # fmt: skip
    if plan is not None and frontend is not None:
        found["frontend"] = {
            "kind": kind_of(frontend, plan).value, "service": str(plan.key.service),
            "port": plan.key.port_name, "service_port": str(plan.key), "created": plan.created,
            "origin": case.origin,
        }
        chosen = {choice.where for choice in fate.choices}
        any_ready = any(endpoint.ready for _, endpoint in case.candidates)
        found["not_chosen"] = [
            {"endpoint": format_socket(*where), "because": _reason(endpoint, fate, node, any_ready=any_ready)}
            for where, endpoint in case.candidates if where not in chosen
        ]
        found["source"] = _source(packet, fate, node)
        if plan.affinity_seconds:
            remembered = side.remembered if side else None
            pinned = format_socket(*remembered) if remembered else ""
            found["affinity"] = {"seconds": plan.affinity_seconds, "remembered": pinned}
    found["kernel"] = _kernel(packet, fate, side, mode, live=live)
    return found


def _kernel(packet: Packet, fate: Fate, side: KernelSide | None, mode: str, *, live: bool) -> Json:
    verdict, differences = judge(packet, fate, side) if side else (
        UNKNOWN, [f"mode {mode} cannot explain its rules"])
    found = side.fate if side else None
    return {
        "mode": mode, "live": live, "verdict": verdict, "differences": differences,
        "outcome": found.outcome.value if found else "",
        "endpoints": _endpoints(found) if found else [],
        "objects": [item._asdict() for item in side.objects] if side else [],
    }  # fmt: skip


def _endpoints(fate: Fate) -> list[Json]:
    return [
        {"endpoint": format_socket(*choice.where), "share": round(choice.share, 6),
         "masqueraded": choice.masqueraded}
        for choice in fate.choices
    ]


def _source(packet: Packet, fate: Fate, node: NodeView) -> str:
    """Return a sentence about the source address that endpoints see; "" if none sees the packet."""
    if fate.outcome is not Outcome.FORWARDED:
        return ""
    source = format_address(packet.source)
    hidden = [choice.where for choice in fate.choices if choice.masqueraded]
    seeing = [choice.where for choice in fate.choices if not choice.masqueraded]
    if not hidden:
        return f"kept: endpoints see {source}"
    if all(where.address == packet.source for where in hidden):
        return (f"kept, except by {format_socket(*hidden[0])}, which is the sender itself (hairpin): "
                "it sees an address of the node")
    if node.masquerade_all:
        why = "masquerade-all is set"
    elif fate.policy in (Policy.INTERNAL, Policy.INTERNAL_LOCAL):
        why = "the sender is not in the network of local pods"
    else:
        why = "traffic to external frontends is masqueraded" if fate.policy is Policy.EXTERNAL else (
            "the sender is the node")
    kept = f"; kept by {format_socket(*seeing[0])}, which is on the node's own network" if seeing else ""
    return f"masqueraded to the node's address on the way to the endpoint: {why}{kept}"


def _reason(endpoint: Endpoint, fate: Fate, node: NodeView, *, any_ready: bool) -> str:
    """Return the reason why *endpoint* is not chosen."""
    if not endpoint.ready:
        if not endpoint.terminating:
            return "not ready"
        if not endpoint.serving:
            return "terminating, and not serving any more"
        if any_ready:
            return "terminating; a ready endpoint exists"
    here = bool(node.name) and endpoint.node == node.name
    if fate.policy in (Policy.INTERNAL_LOCAL, Policy.EXTERNAL_LOCAL) and not here:
        return f"on node {endpoint.node or 'unknown'}, and the policy is Local"
    if fate.policy is None:
        return f"the packet is {fate.outcome.value} before an endpoint is chosen"
    if endpoint.node_hints and node.name not in endpoint.node_hints:
        return f"its hints assign it to node {', '.join(sorted(endpoint.node_hints))}"
    if endpoint.zone_hints and node.zone not in endpoint.zone_hints:
        zones = ", ".join(sorted(endpoint.zone_hints))
        return f"its hints assign it to zone {zones}; this node is in {node.zone or 'none'}"
    return "the hints of other endpoints name this node"

"""The differences between the kernel's treatment of packets and that of the plans, by frontend."""

from collections.abc import Iterable, Iterator, Sequence

from kproxy_core.backend.api import KernelSide
from kproxy_core.explain.answer import Json, decide_case
from kproxy_core.explain.question import Case, Plans
from kproxy_core.explain.verdict import DIFFERS, UNKNOWN, judge
from kproxy_core.model.address import format_socket
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.fate import Origin, Packet, stand_in
from kproxy_core.plan.service_plan import Frontend


def differences(cases: Sequence[Case], sides: Sequence[KernelSide]) -> Iterator[Json]:
    """Yield each difference once, with the senders that it concerns."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for case, side in zip(cases, sides, strict=True):
        packet = case.question.packet
        verdict, texts = judge(packet, decide_case(case), side)
        if verdict in (DIFFERS, UNKNOWN):
            plan = case.question.plan
            where = format_socket(packet.destination, packet.port)
            for text in texts:
                key = (verdict, f"{where}/{packet.protocol.name}", str(plan.key) if plan else "", text)
                found.setdefault(key, []).append(packet.origin.value)
    for (verdict, frontend, service_port, text), origins in found.items():
        yield {
            "kind": "unclear" if verdict == UNKNOWN else "frontend", "frontend": frontend,
            "service_port": service_port, "difference": text, "senders": list(dict.fromkeys(origins)),
        }  # fmt: skip


def stale(frontends: Iterable[Frontend], plans: Plans) -> Iterator[Json]:
    """Yield the *frontends* in the kernel that no Service wants."""
    for frontend in sorted(set(frontends), key=str):
        address, protocol, port = frontend
        # A frontend with an address may stand for a node port there.
        if not plans.owner(frontend) and not plans.owner(Frontend(None, protocol, port)):
            where = f"node port {port}" if address is None else format_socket(address, port)
            yield {
                "kind": "stale", "frontend": f"{where}/{protocol.name}", "service_port": "",
                "difference": "the kernel serves it, and no Service wants it", "senders": [],
            }  # fmt: skip


def packets_to(plans: Plans, keys: Iterable[ServicePortKey]) -> list[Case]:
    """Return a packet of each origin to every frontend of the service ports *keys* that still exist."""
    found: list[Case] = []
    for plan in filter(None, map(plans.plans.get, keys)):
        for frontend in plan.frontends():
            packets = (packet_to(frontend, origin, plans.node) for origin in Origin)
            found += [Case.of(plans, packet, frontend, is_typical=True) for packet in packets if packet]
    return found


def packet_to(frontend: Frontend, origin: Origin, node: NodeView) -> Packet | None:
    """Return a packet of a typical sender; None if no address of the node serves node ports."""
    to = frontend.address or next(iter(node.node_port_addresses), None)
    if to is None:
        return None
    return Packet(origin, stand_in(origin, node), to, frontend.protocol, frontend.port)

"""Explanation of packets: the map elements that decide for local sockets, and the frontends they dialled."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kproxy_core.contract import (
    Destination,
    EndpointShare,
    Fate,
    HostError,
    KernelObject,
    KernelSide,
    Origin,
    Outcome,
    Packet,
    Protocol,
    Question,
    Translation,
    family_of,
    format_socket,
    is_loopback,
)
from kproxy_core.linux.namespaces import in_network_namespaces
from kproxy_ebpf import batch, names
from kproxy_ebpf.batch import address_key, parse_endpoint, parse_frontend, parse_peer
from kproxy_ebpf.kernel.maps import PinnedMaps
from kproxy_ebpf.kernel.sockets import stored_values
from kproxy_ebpf.settings import Settings
from kproxy_ebpf.wanted import Group, frontends_left_by_pods, only_node_clients, wanted


def dialled(source: Destination, endpoint: Destination) -> Destination | None:
    """Return the frontend that the TCP socket at *source* dialled. Raises HostError.

    The sockets of pods are in other network namespaces, which are searched last.
    """
    found: list[Destination] = []

    def look() -> None:
        found.extend(_frontends(source, endpoint))

    look()
    if not found:
        try:
            in_network_namespaces(look)
        except HostError:
            if not found:
                raise
    return found[0] if found else None


def _frontends(source: Destination, endpoint: Destination) -> Iterator[Destination]:
    for address, value in stored_values(Protocol.TCP, source.port):
        if address_key(address) != address_key(source.address):
            continue
        peer = parse_peer(value)
        if peer is not None and parse_endpoint(peer[1], family_of(endpoint.address)) == endpoint:
            to, _, port = parse_frontend(peer[0])
            yield Destination(to, port)


def explain(
    questions: Sequence[Question], rules: Sequence[KernelSide], settings: Settings, maps: PinnedMaps | None
) -> list[KernelSide]:
    """Return *rules*, the base's answers, with the decisions of programs before them.

    *maps* None: of the elements that would be written. Raises SyncFailed.
    """
    return [
        _in_front(question, side, settings, maps) for question, side in zip(questions, rules, strict=True)
    ]


def _in_front(
    question: Question, side: KernelSide, settings: Settings, maps: PinnedMaps | None
) -> KernelSide:
    if not _may_translate(question, settings):
        return side
    found = _written(question) if maps is None else _held(question, maps)
    if found is None:
        return side
    pod = question.packet.origin is Origin.POD
    if pod and found.flags & frontends_left_by_pods(settings.clients, question.node):
        return side
    fate = Fate(Outcome.FORWARDED, "a BPF program chooses when a socket connects", found.choices)
    objects = [*found.objects, *side.objects]
    deviation = _ON_LOOPBACK if is_loopback(question.packet.destination) else side.deviation
    return KernelSide(tuple(objects), fate, found.remembered, deviation, Translation.SOCKET)


def _may_translate(question: Question, settings: Settings) -> bool:
    """Return whether programs decide for this client. Rules decide for pods that are endpoints themselves."""
    packet, plan = question.packet, question.plan
    if packet.origin is Origin.OUTSIDE:
        return False
    if packet.origin is Origin.POD and plan is not None and packet.source in plan.hairpins:
        return False
    return packet.origin is Origin.NODE or not only_node_clients(settings.clients, question.node)


_ON_LOOPBACK = "sockets of the node reach node ports on loopback, too"


class _Found(NamedTuple):
    objects: Sequence[KernelObject]
    choices: tuple[EndpointShare, ...]
    flags: int
    """Flags of the frontend."""
    remembered: Destination | None = None


def _frontend_key(question: Question) -> bytes:
    packet = question.packet
    return batch.frontend_key(packet.destination, packet.protocol, packet.port)


def _node_port_key(question: Question) -> bytes | None:
    """Return the key of the node port that the packet may be for; None: its address serves none."""
    packet, node = question.packet, question.node
    on_loopback = (
        node.node_ports_on_loopback and packet.origin is Origin.NODE
        and packet.destination == node.family.loopback
    )  # fmt: skip
    if on_loopback or packet.destination in node.node_port_addresses:
        return batch.node_port_key(packet.family, packet.protocol, packet.port)
    return None


def _written(question: Question) -> _Found | None:
    if question.plan is None or question.frontend is None:
        return None
    is_node_port = question.frontend.address is None
    if not is_node_port and question.packet.destination in question.addresses:
        return None
    key = _node_port_key(question) if is_node_port else _frontend_key(question)
    for group in wanted(question.plan):
        for frontend in group.frontends:
            if frontend.key == key:
                return _Found(_texts(question, group), _choices(group.endpoints), frontend.flags)
    return None


def _texts(question: Question, group: Group) -> Sequence[KernelObject]:
    dialled = format_socket(question.packet.destination, question.packet.port)
    return [
        KernelObject(f"BPF map {names.FRONTENDS}", f"{dialled} -> {len(group.endpoints)} slots"),
        *_slot_texts(group.endpoints)]


def _slot_texts(slots: Sequence[Destination | None]) -> Iterator[KernelObject]:
    """Yield each slot with its index, and an endpoint that has several once; None: missing."""
    numbers = Counter(slots)
    for index, where in enumerate(slots):
        if where is None:
            yield KernelObject(f"BPF map {names.SLOTS}", f"{index}  (missing)")
        elif number := numbers.pop(where, 0):
            which = index if number == 1 else f"({number} of {len(slots)})"
            yield KernelObject(f"BPF map {names.SLOTS}", f"{which} : {format_socket(*where)}")


def _choices(slots: Sequence[Destination | None]) -> tuple[EndpointShare, ...]:
    """Return the shares of the endpoints in *slots*, some of which may be missing."""
    return tuple(
        EndpointShare(where, number / len(slots), masqueraded=False)
        for where, number in Counter(slots).items() if where is not None)


def _held(question: Question, maps: PinnedMaps) -> _Found | None:
    """Return the maps' elements for a frontend; None: the rules decide."""
    packet = question.packet
    address = batch.address_key(packet.destination)
    value, node_port = maps.find(names.FRONTENDS, _frontend_key(question)), _node_port_key(question)
    if value is not None:
        if maps.find(names.OWN_ADDRESSES, address) is not None:
            return None
    elif node_port is not None and maps.find(names.NODE_ADDRESSES, address) is not None:
        value = maps.find(names.FRONTENDS, node_port)
    if value is None:
        return None
    service = batch.parse_service(value)
    dialled = format_socket(packet.destination, packet.port)
    text = f"{dialled} -> service {service.identity.hex()}, {service.endpoints} slots"
    values = (maps.find(names.SLOTS, batch.slot_key(service.identity, at)) for at in range(service.endpoints))
    slots = [None if value is None else batch.parse_endpoint(value, packet.family) for value in values]
    objects = [KernelObject(f"BPF map {names.FRONTENDS}", text), *_slot_texts(slots)]
    remembered = _remembered(question.packet, service, maps)
    return _Found(objects, _choices(slots), service.frontend, remembered)


def _remembered(packet: Packet, service: batch.ServiceValue, maps: PinnedMaps) -> Destination | None:
    """Return the endpoint of the node's own clients. A pod's address does not tell its namespace."""
    if not service.affinity_seconds or packet.origin is not Origin.NODE:
        return None
    endpoint = maps.pinned_endpoint(service.identity, service.affinity_seconds)
    return None if endpoint is None else batch.parse_endpoint(endpoint, packet.family)

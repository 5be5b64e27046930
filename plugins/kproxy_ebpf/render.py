"""Elements of the maps as text, whole or as the difference to the kernel's."""

from collections import Counter
from collections.abc import Iterator, Mapping

from kproxy_core.contract import Preview, ServicePlan, Update, format_address, format_socket
from kproxy_ebpf import names
from kproxy_ebpf.applied import Contents, compare, contents
from kproxy_ebpf.kernel.maps import pinned_maps
from kproxy_ebpf.settings import Settings
from kproxy_ebpf.wanted import Group, of_node, wanted


def render_text(update: Update) -> str:
    """Return as comments the endpoints of local sockets by destination."""
    lines = ["# BPF maps: local sockets that dial a frontend are sent to one of its endpoints."]
    for _, plan in sorted(update.plans.items()):
        for group in wanted(plan):
            lines += _group(plan, group)
    return "\n".join(lines) + "\n"


def _group(plan: ServicePlan, group: Group) -> Iterator[str]:
    affinity = f", affinity {plan.affinity_seconds} s" if plan.affinity_seconds else ""
    yield f"# {plan.key} ({group.name}{affinity})"
    protocol = plan.key.protocol.name.lower()
    for address, _, port in plan.frontends():
        where = f"node port {port}" if address is None else format_socket(address, port)
        yield f"#   frontend {where}/{protocol}"
    for endpoint, slots in Counter(group.endpoints).items():
        is_local = endpoint.address in plan.hairpins
        hairpin = f", unless the client is {format_address(endpoint.address)}" if is_local else ""
        several = f" in {slots} slots" if slots > 1 else ""
        yield f"#   endpoint {format_socket(*endpoint)}{several}{hairpin}"


def preview(update: Update, settings: Settings) -> Preview:
    """Return the operations on the maps as comments. Raises SyncFailed."""
    with pinned_maps(settings) as maps:
        actual: Contents = {} if maps is None else maps.contents(update.family)
    held, wanted = {name: actual.pop(name, {}) for name in names.OF_NODE}, of_node(update)
    difference = compare(actual, contents(update.plans.values()))
    added = {name: {key: value for key, value in elements.items() if held[name].get(key) != value}
             for name, elements in wanted.items()}
    gone = {name: {key: value for key, value in elements.items() if key not in wanted[name]}
            for name, elements in held.items()}
    lines = [
        *_lines("delete", {**difference.withdrawn, **gone}),
        *_lines("update", {**difference.updates, **added}),
        *_lines("delete", difference.unused),
    ]
    of_addresses = sum(len(elements) for part in (added, gone) for elements in part.values())
    return Preview(difference.operations + of_addresses, "".join(lines))


def _lines(command: str, contents: Mapping[str, Mapping[bytes, bytes]]) -> Iterator[str]:
    for name, elements in contents.items():
        for key, value in elements.items():
            text = f"key hex {key.hex(' ')}" + (f" value hex {value.hex(' ')}" if command == "update" else "")
            yield f"# bpftool map {command} name {names.OBJECT_PREFIX}{name} {text}\n"

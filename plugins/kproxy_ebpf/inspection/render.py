"""The elements of the maps as text for people."""

from collections.abc import Iterator

from kproxy_core.backend.api import Update
from kproxy_core.host.nftables.objects import commands_text, completion
from kproxy_core.model.address import Family, format_address, format_socket
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ebpf.skeleton import notrack_layout, notrack_table
from kproxy_ebpf.wanted import Group, wanted


def render_text(update: Update, notrack_mark: int) -> str:
    """Return the mode's own rules, and as comments the endpoints of local sockets by destination."""
    rules = _notrack_rules(update.node.family, notrack_mark) if notrack_mark else ""
    lines = ["# BPF maps: local sockets that dial a frontend are sent to one of its endpoints."]
    for _, plan in sorted(update.plans.items()):
        for group in wanted(plan):
            lines += _group(plan, group)
    return rules + "\n".join(lines) + "\n"


def _notrack_rules(family: Family, mark: int) -> str:
    return commands_text(completion(notrack_table(family), notrack_layout(mark), {}, None))


def _group(plan: ServicePlan, group: Group) -> Iterator[str]:
    affinity = f", affinity {plan.affinity_seconds} s" if plan.affinity_seconds else ""
    yield f"# {plan.key} ({group.name}{affinity})"
    protocol = plan.key.protocol.name.lower()
    for address, _, port in plan.frontends():
        where = f"node port {port}" if address is None else format_socket(address, port)
        yield f"#   frontend {where}/{protocol}"
    for endpoint in group.endpoints:
        is_local = endpoint.address in plan.hairpins
        hairpin = f", unless the client is {format_address(endpoint.address)}" if is_local else ""
        yield f"#   endpoint {format_socket(*endpoint)}{hairpin}"

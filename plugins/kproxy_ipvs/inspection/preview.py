"""Serves the hook `kproxy_preview`: the difference between the kernel and the plans, as text."""

from collections.abc import Iterator

from kproxy_core.backend.api import Preview, Update
from kproxy_core.model.address import Address, Family, format_address, format_socket
from kproxy_ipvs import names, skeleton
from kproxy_ipvs.applied import Applied, Difference, compare_all, foreign_servers
from kproxy_ipvs.batch import rules as rules_batch
from kproxy_ipvs.batch import sets as sets_batch
from kproxy_ipvs.batch.servers import DeleteDestination, Operation, PutDestination, PutServer
from kproxy_ipvs.inspection.render import put_server, server_name
from kproxy_ipvs.kernel import device, sets
from kproxy_ipvs.kernel.virtual_servers import VirtualServers
from kproxy_ipvs.names import SETS, SetKind
from kproxy_ipvs.settings import Settings
from kproxy_ipvs.wanted import make_style
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import PROGRAM, find_variant


def preview(update: Update, settings: Settings) -> Preview:
    """Return the operations of a resync. Raises HostError, or NoVariant without iptables."""
    family, node = update.family, update.node
    entries = sets.read(family)
    missing = [kind for kind in SETS if kind not in entries]
    on_device, elsewhere = device.read(family)
    expected = Applied.after(update.plans, make_style(node, settings.scheduler, elsewhere))
    with VirtualServers() as servers:
        held = servers.read(family)
    foreign = foreign_servers(held, on_device, entries, settings.exclude_cidrs, node.masquerade_bit)
    difference = compare_all(expected, held, entries, on_device, foreign)
    text = rules_batch.difference(Tables(family, find_variant()).chains(), skeleton.skeleton(node))
    no_device = not device.exists()
    operations = difference.operations + len(missing) + no_device + text.count("\n-") + text.count("\n:")
    return Preview(operations, "".join(_texts(family, difference, missing, text, no_device=no_device)))


def _texts(
    family: Family, difference: Difference, missing: list[SetKind], rules_text: str, *, no_device: bool
) -> Iterator[str]:
    """Yield the operations in the order of a sync."""
    if missing or difference.adds:
        yield "# ipset restore\n" + sets_batch.render(family, missing, sorted(difference.adds))
    if rules_text:
        yield f"# {PROGRAM[family]}-restore --noflush\n{rules_text}"
    operations = [*map(_server, difference.servers)]
    if operations:
        yield "# ipvsadm --restore\n" + "".join(operations)
    links = [f"link add {names.DEVICE} type dummy\n"] if no_device else []
    links += [_address("add", address, family) for address in sorted(difference.bind)]
    if links:
        yield "# ip -batch\n" + "".join(links)
    if difference.deleted:
        yield "# ipvsadm --restore\n" + "".join(f"-D {server_name(one.key)}\n" for one in difference.deleted)
    if difference.unbind:
        yield "# ip -batch\n" + "".join(
            _address("del", address, family) for address in sorted(difference.unbind))
    if difference.deletes:
        yield "# ipset restore\n" + "".join(
            f"del {kind.full_name(family)} {entry}\n" for kind, entry, _ in sorted(difference.deletes))


def _address(command: str, address: Address, family: Family) -> str:
    return f"address {command} {format_address(address)}/{family.bits} dev {names.DEVICE}\n"


def _server(operation: Operation) -> str:
    match operation:
        case PutServer(key, scheduling, new):
            return put_server(key, scheduling, command="-A" if new else "-E")
        case PutDestination(key, where, weight, new):
            command = "-a" if new else "-e"
            return f"{command} {server_name(key)} -r {format_socket(*where)} -m -w {weight}\n"
        case DeleteDestination(key, where):
            return f"-d {server_name(key)} -r {format_socket(*where)}\n"
    return f"-D {server_name(operation.key)}\n"

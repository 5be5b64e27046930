"""All kernel objects of one family as text: input for ipvsadm, ipset, ip and iptables-restore."""

from collections.abc import Iterable, Sequence

from kproxy_core.contract import Address, Family, Preview, Protocol, Update, format_address, format_socket
from kproxy_ipvs import batch, names, skeleton
from kproxy_ipvs.applied import Applied, Difference, compare, foreign_servers
from kproxy_ipvs.batch import DeleteDestination, Operation, PutDestination, PutServer
from kproxy_ipvs.kernel import device, sets
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.names import SETS, SetKind
from kproxy_ipvs.settings import Settings
from kproxy_ipvs.wanted import HASH_FALLBACK, HASH_PORT, PERSISTENT, Scheduling, ServerKey, make_style
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import PROGRAM, find_variant

_CREATE_DEVICE = f"link add {names.DEVICE} type dummy\n"
_SERVICE_OPTION = {Protocol.TCP: "-t", Protocol.UDP: "-u", Protocol.SCTP: "--sctp-service"}


def render_text(update: Update, settings: Settings) -> str:
    """Return the objects that a full update creates in an empty kernel."""
    applied = Applied.after(update.plans, make_style(update.node, settings.scheduler))
    difference = compare(applied, {}, {}, (), ())
    text = batch.difference({}, skeleton.skeleton(update.node))
    return difference_text(update.family, difference, names.SETS, text, no_device=True)


def difference_text(
    family: Family, difference: Difference, missing: Sequence[SetKind], rules_text: str, *, no_device: bool
) -> str:
    """Return the operations in the order of a sync."""
    parts = [
        ("ipset restore", batch.render(family, missing, sorted(difference.adds))),
        (f"{PROGRAM[family]}-restore --noflush", rules_text),
        ("ipvsadm --restore", _servers(difference.servers)),
        ("ip -batch", _CREATE_DEVICE * no_device + _addresses("add", difference.bind, family)),
        ("ipvsadm --restore", _servers(difference.deleted)),
        ("ip -batch", _addresses("del", difference.unbind, family)),
        ("ipset restore", "".join(
            f"del {kind.full_name(family)} {entry}\n" for kind, entry, _ in sorted(difference.deletes))),
    ]  # fmt: skip
    return "".join(f"# {program}\n{text}" for program, text in parts if text)


def _addresses(command: str, addresses: Iterable[Address], family: Family) -> str:
    """Return the lines that ``add`` or ``del`` addresses of the device."""
    return "".join(
        f"address {command} {format_address(address)}/{family.bits} dev {names.DEVICE}\n"
        for address in sorted(addresses)
    )


def _servers(operations: Iterable[Operation]) -> str:
    """Return the input of ``ipvsadm --restore``."""
    return "".join(map(_server, operations))


def _server(operation: Operation) -> str:
    match operation:
        case PutServer(key, scheduling, new):
            return f"{'-A' if new else '-E'} {_name(key)} {_scheduling(scheduling)}\n"
        case PutDestination(key, where, weight, new):
            command = "-a" if new else "-e"
            return f"{command} {_name(key)} -r {format_socket(*where)} -m -w {weight}\n"
        case DeleteDestination(key, where):
            return f"-d {_name(key)} -r {format_socket(*where)}\n"
    return f"-D {_name(operation.key)}\n"


def _name(key: ServerKey) -> str:
    """Return the options with which ipvsadm names a virtual server."""
    if key.address is None:
        return f"-f {key.mark:#x}{'' if key.family.size == 4 else ' -6'}"
    return f"{_SERVICE_OPTION[Protocol(key.protocol)]} {format_socket(key.address, key.port)}"


def _scheduling(of: Scheduling) -> str:
    """Return the options with which ipvsadm describes scheduling."""
    flags = f" -p {of.timeout}" if of.flags & PERSISTENT else ""
    hashing = [
        f"{of.scheduler}-{name}" for name, flag in (("fallback", HASH_FALLBACK), ("port", HASH_PORT))
        if of.flags & flag
    ]  # fmt: skip
    flags += f" -b {','.join(hashing)}" if hashing else ""
    return f"-s {of.scheduler}{flags}"


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
    difference = compare(expected, held, entries, on_device, foreign)
    text = batch.difference(Tables(family, find_variant()).chains(), skeleton.skeleton(node))
    no_device = not device.exists()
    operations = difference.operations + len(missing) + no_device + text.count("\n-") + text.count("\n:")
    return Preview(operations, difference_text(family, difference, missing, text, no_device=no_device))

"""All kernel objects of one family as text: input for ipvsadm, ipset, ip and iptables-restore."""

from collections.abc import Iterable

from kproxy_core.backend.api import Update
from kproxy_core.model.address import Address, Family, Protocol, format_address, format_socket
from kproxy_ipvs import names, skeleton
from kproxy_ipvs.applied import Applied, compare_all
from kproxy_ipvs.batch import rules, sets
from kproxy_ipvs.batch.servers import DeleteDestination, Operation, PutDestination, PutServer
from kproxy_ipvs.settings import Settings
from kproxy_ipvs.wanted import HASH_FALLBACK, HASH_PORT, PERSISTENT, Scheduling, ServerKey, make_style
from kproxy_xtables.variant import PROGRAM

_SERVICE_OPTION = {Protocol.TCP: "-t", Protocol.UDP: "-u", Protocol.SCTP: "--sctp-service"}


def render_text(update: Update, settings: Settings) -> str:
    """Return the objects that a full update creates in an empty kernel."""
    node, family = update.node, update.family
    applied = Applied.after(update.plans, make_style(node, settings.scheduler))
    difference = compare_all(applied, {}, {}, (), ())
    return "".join([
        "# ipvsadm --restore\n", servers_text(difference.servers),
        "# ipset restore\n", sets.render(family, names.SETS, sorted(difference.adds)),
        "# ip -batch\n", CREATE_DEVICE, addresses_text("add", difference.bind, family),
        f"# {PROGRAM[family]}-restore --noflush\n", rules.difference({}, skeleton.skeleton(node)),
    ])  # fmt: skip


CREATE_DEVICE = f"link add {names.DEVICE} type dummy\n"


def addresses_text(command: str, addresses: Iterable[Address], family: Family) -> str:
    """Return the lines that ``add`` or ``del`` addresses of the device."""
    return "".join(
        f"address {command} {format_address(address)}/{family.bits} dev {names.DEVICE}\n"
        for address in sorted(addresses)
    )


def servers_text(operations: Iterable[Operation]) -> str:
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

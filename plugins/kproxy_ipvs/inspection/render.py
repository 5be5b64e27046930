"""All kernel objects of one family as text: input for ipvsadm, ipset, ip and iptables-restore."""

from collections.abc import Iterator

from kproxy_core.backend.api import Update
from kproxy_core.model.address import Protocol, format_address, format_socket
from kproxy_ipvs import names, skeleton
from kproxy_ipvs.applied import Applied
from kproxy_ipvs.batch import rules, sets
from kproxy_ipvs.settings import Settings
from kproxy_ipvs.wanted import HASH_FALLBACK, HASH_PORT, PERSISTENT, Scheduling, Server, ServerKey, make_style
from kproxy_xtables.variant import PROGRAM

_SERVICE_OPTION = {Protocol.TCP: "-t", Protocol.UDP: "-u", Protocol.SCTP: "--sctp-service"}


def render_text(update: Update, settings: Settings) -> str:
    """Return the objects that a full update creates in an empty kernel."""
    node = update.node
    applied = Applied.after(update.plans, make_style(node, settings.scheduler))
    parts = ["# ipvsadm --restore\n", *_servers(applied.servers)]
    parts += ["# ipset restore\n", sets.render(update.family, names.SETS, sorted(applied.elements))]
    parts.append("# ip -batch\n")
    parts.append(f"link add {names.DEVICE} type dummy\n")
    for address in sorted(applied.addresses):
        parts.append(f"address add {format_address(address)}/{update.family.bits} dev {names.DEVICE}\n")
    parts.append(f"# {PROGRAM[update.family]}-restore --noflush\n")
    parts.append(rules.difference({}, skeleton.skeleton(node)))
    return "".join(parts)


def _servers(servers: dict[ServerKey, Server]) -> Iterator[str]:
    for key, server in servers.items():
        yield put_server(key, server.scheduling, command="-A")
        for where in server.destinations:
            yield f"-a {server_name(key)} -r {format_socket(*where)} -m -w 1\n"


def server_name(key: ServerKey) -> str:
    """Return the options with which ipvsadm names a virtual server."""
    if key.address is None:
        return f"-f {key.mark:#x}{'' if key.family.size == 4 else ' -6'}"
    return f"{_SERVICE_OPTION[Protocol(key.protocol)]} {format_socket(key.address, key.port)}"


def put_server(key: ServerKey, scheduling: Scheduling, *, command: str) -> str:
    """Return the line that creates a virtual server, or changes it."""
    flags = f" -p {scheduling.timeout}" if scheduling.flags & PERSISTENT else ""
    scheduler = scheduling.scheduler
    hashing = [
        f"{scheduler}-{name}" for name, flag in (("fallback", HASH_FALLBACK), ("port", HASH_PORT))
        if scheduling.flags & flag
    ]  # fmt: skip
    flags += f" -b {','.join(hashing)}" if hashing else ""
    return f"{command} {server_name(key)} -s {scheduler}{flags}\n"

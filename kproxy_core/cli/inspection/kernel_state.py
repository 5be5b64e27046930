"""The kernel's state as text, by the programs and files that exist here. Loads no kernel module."""

from collections.abc import Iterator
from pathlib import Path

from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.libnftables.texts import list_tables
from kproxy_core.host.modules import Modules, Presence

_COMMANDS = (
    # File, module that the command would load, command.
    ("iptables.txt", "", ("iptables-save", "-c")),
    ("ip6tables.txt", "", ("ip6tables-save", "-c")),
    ("ipset.txt", "ip_set", ("ipset", "list")),
    ("addresses.txt", "", ("ip", "address")),
    ("routes.txt", "", ("ip", "route", "show", "table", "all")),
    ("ipv6-routes.txt", "", ("ip", "-6", "route", "show", "table", "all")),
    ("routing-rules.txt", "", ("ip", "rule")),
)
_FILES = (
    ("ip_vs.txt", "/proc/net/ip_vs"),
    ("conntrack-statistics.txt", "/proc/net/stat/nf_conntrack"),
    ("sockets.txt", "/proc/net/sockstat"),
    ("modules.txt", "/proc/modules"),
)
_SYSCTLS = (
    "net/netfilter/*", "net/ipv4/vs/*", "net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding",
    "net/ipv4/conf/all/route_localnet",
)  # fmt: skip
"""Patterns below /proc/sys."""


def kernel_state() -> Iterator[tuple[str, str]]:
    modules = Modules()

    def is_loaded(module: str) -> bool:
        return modules.presence(module) in (Presence.LOADED, Presence.BUILT_IN)

    if is_loaded("nf_tables"):
        yield "nft-ruleset.txt", _ruleset()
    for name, module, command in _COMMANDS:
        if (not module or is_loaded(module)) and programs.find(command[0]):
            yield name, _output(command)
    for name, path in _FILES:
        try:
            yield name, Path(path).read_text(errors="replace")
        except OSError:
            continue
    yield "sysctl.txt", "".join(_sysctls())


def _ruleset() -> str:
    """Return all tables as nft prints them, behind a comment for each one that it cannot."""
    try:
        text, unread = list_tables(style=["handle_output"])
    except HostError as error:
        return f"# {error}\n"
    return "".join(f"# {problem}\n" for problem in unread) + text


def _output(command: tuple[str, ...]) -> str:
    try:
        done = programs.run(*command)
    except HostError as error:
        return f"{error}\n"
    return done.stdout + (done.stderr if done.returncode else "")


def _sysctls() -> Iterator[str]:
    root = Path("/proc/sys")
    for path in (path for pattern in _SYSCTLS for path in sorted(root.glob(pattern))):
        try:
            yield f"{path.relative_to(root)} = {path.read_text(errors='replace').strip()}\n"
        except OSError:
            continue

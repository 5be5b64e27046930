"""The kernel state of a network namespace, whichever program made it: read, compared, and destroyed.

The kit does not know the backend. It reads everything that backends usually program, and the output of the
commands in ``kproxy_state``.
"""

import re
import shutil
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kproxy_conformance.network.namespaces import CommandFailed, run
from kproxy_core.netlink.messages import NETLINK_NETFILTER, NFGENMSG, attribute
from kproxy_core.netlink.sockets import NetlinkSocket

_LEGACY = {
    "iptables-legacy": Path("/proc/net/ip_tables_names"),
    "ip6tables-legacy": Path("/proc/net/ip6_tables_names"),
}
_IPVS = Path("/proc/net/ip_vs")
_IPSET = Path("/sys/module/ip_set")
_GET_TABLES = struct.pack("=IHHIIBBH", 20, 0x0A01, 0x0301, 0, 0, 0, 0, 0)
"""A dump of NFT_MSG_GETTABLE (linux/netlink.h, linux/netfilter/nf_tables.h)."""
_GET_GENERATION = struct.pack("=IHHIIBBH", 20, 0x0A10, 0x0001, 0, 0, 0, 0, 0)
"""NFT_MSG_GETGEN. The number is the first attribute of the answer."""
_GENERATION = slice(24, 28)
_LIST_SETS, _ALL_SETS = 6 << 8 | 7, NFGENMSG.pack(0, 0, 0) + attribute(1, b"\x06")
"""IPSET_CMD_LIST, and its protocol (linux/netfilter/ipset/ip_set.h)."""
_KIND, _ENDS = struct.Struct("=4xH"), (2, 3)
"""Of a message; NLMSG_ERROR and NLMSG_DONE."""
_SUCCESSOR = "kproxy-kit-successor"
_LEFT_EMPTY = re.compile(r"table ip6? (filter|nat|mangle|raw|security)\b")
_BASE_CHAIN = re.compile(r"type \S+ hook .* policy accept;")
_COUNTS = re.compile(r"counter packets \d+ bytes \d+|\[\d+:\d+\] ?| expires \S+")
_VARIABLE = re.compile(r"\b0x[0-9a-f]+\b|[0-9a-fA-F:.]*[0-9]+[0-9a-fA-F:.]*")
_CHAIN = re.compile(r"(table \S+ \S+ chain (\S+))(.*)")
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class KernelState:
    """One line per object with its location, sorted, without counters and timeouts."""

    lines: tuple[str, ...]

    @property
    def in_use(self) -> tuple[str, ...]:
        """Return the state without unreferenced chains, which a backend may keep for reuse."""
        lines = self.lines
        while True:
            chains = {found[2]: found[1] for line in lines if (found := _CHAIN.fullmatch(line))}
            based = {found[2] for line in lines if (found := _CHAIN.fullmatch(line)) and " hook " in found[3]}
            led = {word for line in lines for word in re.findall(r"(?:jump|goto) (\S+)", line)}
            unused = tuple(f"{chains[name]} " for name in chains.keys() - based - led)
            kept = tuple(line for line in lines if not f"{line} ".startswith(unused))
            if len(kept) == len(lines):
                return kept
            lines = kept

    @property
    def shape(self) -> list[str]:
        """Return the state without numbers and addresses: equal if as many objects of a kind are in use."""
        return sorted(_VARIABLE.sub("#", line) for line in self.in_use)


def difference(before: Sequence[str], after: Sequence[str]) -> str:
    """Return the first added (+) and removed (-) lines; "" without a difference."""
    left, right = Counter(before), Counter(after)
    changes = [f"- {line}" for line in (left - right).elements()]
    changes += [f"+ {line}" for line in (right - left).elements()]
    if len(changes) > _SHOWN:
        changes[_SHOWN:] = [f"... and {len(changes) - _SHOWN} more"]
    return "\n".join(changes)


class Reader:
    """Reads the state of the calling thread's namespace.

    Lists nf_tables again only after another commit, and ipsets only if a dump of them differs from the last.
    """

    def __init__(self, commands: Sequence[str] = ()) -> None:
        """*commands* are shell commands that print more state."""
        self._commands = commands
        self._listed: tuple[int, list[str]] = (0, [])
        """The number of a commit, and the objects of nf_tables after it."""
        self._listed_sets: tuple[bytes, list[str]] = (b"", [])
        """A dump of all ipsets, and what ``ipset save`` prints of it."""

    def read(self) -> KernelState:
        lines = [*self._nft(), *_legacy(), *self._ipsets(), *_virtual_servers()]
        lines += [*_links(), *_routes4(), *_routes6()]
        for command in self._commands:
            done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)  # noqa: S602
            lines += [f"{command}: {line}" for line in done.stdout.splitlines()]
        return KernelState(tuple(sorted(lines)))

    def _nft(self) -> list[str]:
        number = commits()
        if not number or number != self._listed[0]:
            self._listed = number, list(_nft())
        return self._listed[1]

    def _ipsets(self) -> list[str]:
        dumped = _dumped_ipsets()
        if dumped != self._listed_sets[0]:
            self._listed_sets = dumped, list(_ipsets())
        return self._listed_sets[1]


def commits() -> int:
    """Return the number of the last commit to nf_tables in the calling thread's namespace, by any process."""
    return int.from_bytes(_first_answer(_GET_GENERATION)[_GENERATION], "big")


def destroy(links: Sequence[str], commands: Sequence[str] = ()) -> None:
    """Remove all rules, sets and *links*, as a careless tool might."""
    if shutil.which("nft"):
        run("nft", "flush", "ruleset")
    for program, names in _LEGACY.items():
        for table in _words(names):
            run(program, "-t", table, "-F")
            run(program, "-t", table, "-X")
    if any(_ipsets()):
        run("ipset", "destroy")
    for link in links:
        run("ip", "link", "delete", link)
    for command in commands:
        run("sh", "-c", command)


def translate_addresses() -> None:
    """Add rules that need NAT and do nothing: without any, the kernel stops translating connections."""
    chains = "".join(
        f"chain {hook} {{ type nat hook {hook} priority 0; ct status dnat accept; }}; "
        for hook in ("prerouting", "input", "output", "postrouting")
    )
    try:
        for family in ("ip", "ip6"):
            run("nft", "-f", "-", stdin=f"table {family} {_SUCCESSOR} {{ {chains} }}\n")
    except CommandFailed:  # nft is missing, or this kernel does not support it
        for program in _LEGACY:
            run(program, "-w", "-t", "nat", "-N", _SUCCESSOR)


def stop_translating() -> None:
    """Remove the rules of `translate_addresses`, if any."""
    with suppress(CommandFailed):
        run("nft", "-f", "-", stdin="".join(
            f"{verb} table {family} {_SUCCESSOR}\n" for family in ("ip", "ip6") for verb in ("add", "delete")
        ))  # fmt: skip
    for program in _LEGACY:
        with suppress(CommandFailed):
            run(program, "-w", "-t", "nat", "-X", _SUCCESSOR)


def block_as_others_do(table: str, address: str) -> None:
    """Add a foreign rule: in the nf_tables table *table*, else with iptables."""
    rules = f"chain c {{ type filter hook output priority 0; ip daddr {address} drop; }};"
    try:
        run("nft", "-f", "-", stdin=f"table ip {table} {{ {rules} }}\n")
    except CommandFailed:  # as above
        run("iptables-legacy", "-w", "-N", table)
        run("iptables-legacy", "-w", "-A", table, "-d", address, "-j", "DROP")
        run("iptables-legacy", "-w", "-A", "OUTPUT", "-j", table)


def links() -> set[str]:
    return {line.partition(":")[0].strip() for line in _read(Path("/proc/net/dev")).splitlines()[2:]}


def _nft() -> Iterator[str]:
    """Leave out empty tables of the iptables programs: reading them creates them.

    nft warns of targets of iptables that it does not know in the middle of their rules.
    """
    if not shutil.which("nft") or not _first_answer(_GET_TABLES):
        return
    command = ["nft", "list", "ruleset"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    listing = [line for line in done.stdout.splitlines() if line.strip()]
    for table, body in _blocks(listing, ""):
        lines = []
        for block, content in _blocks(body, "\t"):
            inside = list(_objects(_COUNTS.sub(" ", line).strip() for line in content))
            if not (len(inside) == 1 and _BASE_CHAIN.fullmatch(inside[0]) and _LEFT_EMPTY.match(table)):
                lines += [block, *(f"{block} {line}" for line in inside)]
        if lines or not _LEFT_EMPTY.match(table):
            yield table
            yield from (f"{table} {line}" for line in lines)


def _first_answer(request: bytes) -> bytes:
    """Ask nf_tables, far cheaper than with nft; b"" where it has nothing, or this kernel lacks nf_tables."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as sock:
            sock.send(request)
            answer = sock.recv(1 << 16)
    except OSError:
        return b""
    return b"" if _KIND.unpack_from(answer)[0] in _ENDS else answer


def _blocks(lines: Sequence[str], indent: str) -> Iterator[tuple[str, list[str]]]:
    """Yield headings without their brace, and the text between the braces."""
    heading, body = "", list[str]()
    for line in lines:
        if line == f"{indent}}}":
            yield heading, body
        elif line.startswith(indent) and line[len(indent)] not in "\t#":
            heading, body = line.strip().replace(" {", "", 1), []
        else:
            body.append(line)


def _objects(lines: Iterable[str]) -> Iterator[str]:
    """Yield rules and properties unchanged, and elements one by one: their order is not stable."""
    elements = ""
    for line in lines:
        if elements or line.startswith("elements = {"):
            elements += f"{line} "
            if line.endswith("}"):
                yield from sorted(e.strip() for e in elements.partition("{ ")[2].rstrip(" }").split(","))
                elements = ""
        else:
            yield line


def _legacy() -> Iterator[str]:
    for program, names in _LEGACY.items():
        if not _words(names):
            continue
        table = ""
        for line in run(f"{program}-save").splitlines():
            if line.startswith("*"):
                table = line[1:]
            elif not re.match(r"#|COMMIT|:\w+ ACCEPT", line):
                yield f"{program} {table} {_COUNTS.sub('', line).strip()}"


def _dumped_ipsets() -> bytes:
    """Return a dump of all ipsets, far cheaper than with ipset; b"" without any, or without ipset."""
    if not _IPSET.exists() or not shutil.which("ipset"):
        return b""
    with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        return sock.dump(_LIST_SETS, _ALL_SETS, lambda answers: b"".join(data[a:z] for data, a, z in answers))


def _ipsets() -> Iterator[str]:
    if _dumped_ipsets():
        yield from (f"ipset {line}" for line in run("ipset", "save").splitlines())


def _virtual_servers() -> Iterator[str]:
    server = ""
    for line in _read(_IPVS).splitlines()[3:]:
        words = line.split()
        if words[0] == "->":  # without connection counts
            yield f"{server} -> {' '.join(words[1:4])}"
        else:
            server = f"virtual server {' '.join(words)}"
            yield server


def _links() -> Iterator[str]:
    yield from (f"link {name}" for name in links())


def _routes4() -> Iterator[str]:
    """Yield the routes of all tables; local addresses are routes in table local."""
    table = prefix = ""
    for line in _read(Path("/proc/net/fib_trie")).splitlines():
        words = line.split()
        if not line.startswith(" "):
            table = line.rstrip(":").lower()
        elif words[0] == "|--":
            prefix = words[1]
        elif words[0].startswith("/"):
            yield f"route {table} {prefix}{' '.join(words)}"


def _routes6() -> Iterator[str]:
    for line in _read(Path("/proc/net/ipv6_route")).splitlines():
        network, length, _, _, gateway, *_, link = line.split()
        network, gateway = (socket.inet_ntop(socket.AF_INET6, bytes.fromhex(h)) for h in (network, gateway))
        yield f"route {network}/{int(length, 16)} via {gateway} dev {link}"


def _words(path: Path) -> list[str]:
    return _read(path).split()


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii") if path.exists() else ""

"""The rules that a packet meets on its way, whether they match or not, counted with nft's trace."""

import os
import re
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from kproxy_conformance.network.patience import patience

_LINE = re.compile(r"trace id (\w+) ip (\S+) (\S+) (packet: |policy |rule (.*) \(verdict (\w+)(?: (\S+))?\))")
_TRACE = """
table ip trace {
    chain pre { type filter hook prerouting priority -350; meta nftrace set 1;
    }
    chain out { type filter hook output priority -350; meta nftrace set 1;
    }
}
"""
_LAST = ("127.0.0.1", 9)
"""Destination of the packet that ends a trace."""

Chains = Mapping[str, Sequence[str]]
"""Rules by chain."""


def nft(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text, check=True, capture_output=True, text=True)


def chains_of(table: str) -> Chains:
    """Return the rules of a table of IPv4."""
    command = ["nft", "-s", "list", "table", "ip", table]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, list[str]] = {}
    chain = ""
    for line in listed.stdout.splitlines():
        words = line.split()
        if words[:1] == ["chain"]:
            chain = words[1]
            found[chain] = []
        elif line == "\t}":
            chain = ""
        elif chain and not line.startswith("\t\ttype "):
            found[chain].append(re.sub(r' comment ".*"$', "", line.strip()))
    return found


@contextmanager
def tracing(table: str) -> Iterator[Callable[[socket.socket, str, int], list[str]]]:
    """Trace the packets of this namespace.

    Yields a function that sends a datagram from a socket to an address and port, and returns the rules of
    *table* that it met.
    """
    chains = chains_of(table)
    with subprocess.Popen(["nft", "monitor", "trace"], stdout=subprocess.PIPE, bufsize=0) as monitor:
        assert monitor.stdout is not None
        trace = monitor.stdout
        os.set_blocking(trace.fileno(), False)

        def met(sender: socket.socket, address: str, port: int) -> list[str]:
            sender.sendto(b"x", (address, port))
            first = rf"ip trace (?:pre|out) packet: .* ip daddr {address} .* udp dport {port} "
            text = _read(trace, first) + _until_end(trace)
            return _met(chains, _steps(table, first, text.splitlines()))

        nft(_TRACE)
        try:
            _until_end(trace)
            yield met
        finally:
            nft("delete table ip trace\n")
            monitor.terminate()


def _until_end(trace: IO[bytes]) -> str:
    """Send packets to `_LAST` until one is seen. Return the trace so far."""
    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.sendto(b"", _LAST)

    return _read(trace, rf"ip daddr {_LAST[0]} .* udp dport {_LAST[1]} ", send)


def _read(trace: IO[bytes], until: str, send: Callable[[], object] = lambda: None) -> str:
    """Read until a line matches, calling *send* again and again."""
    text = ""
    deadline = time.monotonic() + 10 * patience()
    while not re.search(until, text):
        assert time.monotonic() < deadline, text
        send()
        select.select([trace], [], [], 0.2)
        text += (trace.read() or b"").decode()
    return text


def _steps(table: str, first: str, lines: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Return chain, rule, verdict and where this leads for each rule that matched.

    The beginning and the end of a base chain have no rule; the trace may lack one of them.
    """
    found = [match for match in map(_LINE.match, lines) if match]
    packet = next(match[1] for match in found if re.search(first, match.string))
    return [(match[3], match[5] or "", match[6] or "", match[7] or "")
            for match in found if match[1] == packet and match[2] == table]


def _met(chains: Chains, steps: Sequence[tuple[str, str, str, str]]) -> list[str]:
    rest = list(steps)
    rules: list[str] = []

    def end_of(chain: str) -> str:
        """Return the verdict that ends the way through the base chain; "" if *chain* has none."""
        for rule in chains[chain]:
            rules.append(rule)
            if not rest or rest[0][:2] != (chain, rule):
                continue
            _, _, verdict, to = rest.pop(0)
            if verdict in ("accept", "drop"):
                return verdict
            if verdict == "goto":
                return end_of(to)
            if verdict == "jump" and (end := end_of(to)):
                return end
        return ""

    while rest:
        base, rule, *_ = rest[0]
        if not rule:
            del rest[0]
        end_of(base)
        if rest and rest[0][:2] == (base, ""):
            del rest[0]
    return rules

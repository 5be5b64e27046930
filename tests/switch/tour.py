"""A tour of modes in one running kproxy, under continuous load.

    python -m tests.switch.tour DIRECTORY CONNECTIONS STOP...

A stop is a mode; ``iptables-nft`` and ``iptables-legacy`` name an interface of the kernel as well. Each way
from a stop to the next is a leg of at least CONNECTIONS new connections and flows. What became of the legs is
written to DIRECTORY/legs.json, and the state of the node after a request without answer to files beside it.
"""

import json
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from tests.switch.room import EBPF, PATIENCE, Loads, Room, room
from tests.switch.witness import Witness

COMMAND = [sys.executable, "-B", "-m", "tests.switch.tour"]
CONNECTIONS = 4_000
"""New connections for each switch at least, a quarter of them before it and a quarter after it."""
CONNECTIONS_IN_A_GUEST = 800
"""More are opened while one mode replaces another: in a guest that takes most of a minute."""
HERE = (
    "nftables", "iptables-nft", "nftables", "iptables-legacy", "nftables", "userspace", "iptables-nft",
    "userspace", "iptables-legacy", "userspace", "nftables",
)  # fmt: skip
SOCKETS = (
    "ebpf", "nftables", "ebpf", "iptables-nft", "ebpf", "iptables-legacy", "ebpf", "userspace", "ebpf",
)  # fmt: skip
"""A separate tour, at the same time, that counts only connections of sockets in the room's cgroup."""
GUESTS = (
    ("ipvs", "nftables", "ipvs", "iptables-nft", "ipvs", "ebpf", "ipvs"),
    ("iptables-legacy", "ipvs", "userspace", "ipvs", "iptables-legacy"),
)
"""Tours in guests with IPVS, for both interfaces of iptables."""

LEGS = "legs.json"
IPVS = {"ipvs", "kube-ipvs0"}


@dataclass(frozen=True, slots=True)
class Leg:
    """Observations of one switch, until the old mode is removed."""

    before: str
    after: str
    status: int
    """Exit status of the command; 0: switched, -1: the leg was not finished."""
    said: str
    """Output of the command, or the reason why the leg was not finished."""
    seconds: float
    """Duration of the command."""
    made: int
    """Answered new connections and flows."""
    exchanged: int
    """Answers on connections that were open before the switch and continued after it."""
    failures: list[str]
    left: list[str]
    """`Room.traces` at the end."""
    kept: list[str]
    """Tables of nf_tables that the switch kept."""
    log: str = ""
    """The end of the proxy's log, if *left* is wrong or there were failures."""


def mode_of(stop: str) -> str:
    return stop.partition("-")[0]


def belongs(traces: Collection[str], stop: str) -> bool:
    """Return whether *traces* (see `Room.traces`) are those of *stop* alone.

    Objects of ipvs mode may remain for its connections, including those in TIME_WAIT (two minutes).
    """
    kinds = {trace: trace.removesuffix(" (legacy)") for trace in traces}
    if stop == "ipvs":
        return len(kinds) == len(IPVS) and set(kinds.values()) == IPVS
    serving = [trace for trace, kind in kinds.items() if kind not in IPVS]
    if stop == EBPF:
        return sorted(kinds[trace] for trace in serving) == [EBPF, "nftables"]
    if stop.startswith("iptables-"):
        return serving == ["iptables (legacy)" if stop.endswith("-legacy") else "iptables"]
    return [kinds[trace] for trace in serving] == [stop]


def tour(directory: Path, connections: int, stops: Sequence[str]) -> Iterator[Leg]:
    """Switch from the first stop to the last. Ends at the first failure."""
    with room(directory, sockets=EBPF in stops) as where:
        _choose_iptables(where, stops[0])
        hosts = where.node, where.client, *where.pods
        with (
            where.proxy(mode_of(stops[0])),
            where.used(on_loopback=True) as loads,
            closing(Witness(hosts, loads.all, directory, lambda _: False)),
        ):
            for before, after in pairwise(stops):
                try:
                    leg = _leg(where, loads, before, after, connections)
                except Exception:  # noqa: BLE001 - it is the leg's result
                    reason = traceback.format_exc()
                    leg = Leg(before, after, -1, reason, 0, 0, 0, [], [], [], where.log_tail())
                yield leg
                if leg.status:
                    return


def _leg(where: Room, loads: Loads, before: str, after: str, connections: int) -> Leg:
    since, made, exchanged, tables = time.monotonic(), loads.made, loads.exchanged, where.tables()
    _choose_iptables(where, after)
    loads.more(connections // 4)
    begun = time.monotonic()
    done = where.kproxy("switch", mode_of(after))
    seconds = time.monotonic() - begun
    loads.more(connections // 4)
    loads.renew()  # do not wait for connections of the old mode
    loads.more(connections - (loads.made - made))
    loads.renew()  # pending exchanges belong to this leg
    left = _left(where, after)
    failures = loads.failures(since)
    log = "" if belongs(left, after) and not failures else where.log_tail()
    return Leg(
        before, after, done.returncode, done.stdout + done.stderr, round(seconds, 3),
        loads.made - made, loads.exchanged - exchanged, failures,
        sorted(left), sorted(tables & where.tables()), log,
    )  # fmt: skip


def _left(where: Room, stop: str) -> set[str]:
    """Wait for the traces of *stop*, and return those found in the end."""
    deadline = time.monotonic() + PATIENCE
    while not belongs(found := where.traces(), stop) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _choose_iptables(where: Room, stop: str) -> None:
    if stop.startswith("iptables-"):
        where.choose_iptables(stop.rpartition("-")[2])


def main(directory: str, connections: str, *stops: str) -> None:
    legs = []
    try:
        for leg in tour(Path(directory), int(connections), stops):
            way = f"{leg.before} -> {leg.after}"
            print(f"{way}: {leg.made} made, {len(leg.failures)} failed, {leg.seconds} s", flush=True)
            legs.append(asdict(leg))
    finally:
        Path(directory, LEGS).write_text(json.dumps(legs, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])

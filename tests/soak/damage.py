"""Changes that other programs make to a node: to rules and maps, to workers and to BPF programs."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from kproxy_ebpf.kernel.maps import detach_pins
from kproxy_ebpf.names import PROGRAMS
from kproxy_iptables import names as iptables
from kproxy_userspace.names import PORTAL_CHAINS
from tests.core.namespaces import Namespace
from tests.soak.moments import Moment, now
from tests.soak.proxy import Proxy

Json = dict[str, Any]

TABLES = {
    "nftables": ("kproxy",),
    "ebpf": ("kproxy",),
    "iptables": ("nat", "filter"),
    "userspace": ("nat",),
}
"""The nf_tables tables of each mode; iptables' own interface for nf_tables makes tables as well."""
_OWNS: Mapping[str, Callable[[str, str], bool]] = {
    "iptables": iptables.is_ours,
    "userspace": lambda _, chain: chain in PORTAL_CHAINS,
}
"""Returns whether a chain, given its table, is the mode's. A mode that retires has others in these tables."""
_KEPT = {"iptables": (iptables.KUBELET_FIREWALL,)}
"""Chains of others with rules of the mode."""
FAMILIES = {"ip": "IPv4", "ip6": "IPv6"}
BOTH = frozenset(FAMILIES.values())


class Done(NamedTuple):
    """One damage, done."""

    what: str
    families: frozenset[str]
    """Labels of the IP families whose repair is still to be awaited."""
    since: Moment | None = None
    """Start of the program that damages."""
    again: Moment | None = None
    """Start of another one that went on with it. The repair must follow."""


NOTHING = Done("", frozenset())


class Node(NamedTuple):
    """The node and the means to damage it."""

    node: Namespace
    proxy: Proxy
    pins: Path
    rng: random.Random
    unchanged: Callable[[], AbstractContextManager[None]]
    """Returns a context in which no object changes, so that the rules change no more than for a repair."""


Damage = Callable[[Node], Done]


def flush_ruleset(where: Node) -> Done:
    return _nft(where, "flush ruleset", BOTH)


def delete_table(where: Node) -> Done:
    family, table = _table(where)
    return _nft(where, f"delete table {family} {table}", _of(family))


def flush_table(where: Node) -> Done:
    """Delete the rules of a table, and keep its chains and maps."""
    family, table = _table(where)
    return _nft(where, f"flush table {family} {table}", _of(family))


def make_table_dormant(where: Node) -> Done:
    family, table = _table(where)
    return _nft(where, f"add table {family} {table} {{ flags dormant; }}", _of(family))


def flush_chain(where: Node) -> Done:
    """Fails if the rule that was listed has gone: nothing is announced if the chain is empty by then."""
    rule = _pick(where, "rule", lambda value: is_ours(where.proxy.mode, value))
    return _on(where, rule, lambda at: f"""\
delete rule {at} {rule['chain']} handle {rule['handle']}
flush chain {at} {rule['chain']}""", what=f"flush chain {rule.get('chain')}")


def delete_rule(where: Node) -> Done:
    rule = _pick(where, "rule", lambda value: is_ours(where.proxy.mode, value))
    return _on(where, rule, lambda at: f"delete rule {at} {rule['chain']} handle {rule['handle']}")


def insert_rule(where: Node) -> Done:
    """Drop the packets that a chain of the mode gets."""
    rule = _pick(where, "rule", lambda value: _owns(where.proxy.mode, value["table"], value["chain"]))
    return _on(where, rule, lambda at: f"insert rule {at} {rule['chain']} counter drop")


def add_chain(where: Node) -> Done:
    family, table = _table(where)
    return _nft(where, f"add chain {family} {table} foreign-{where.rng.randrange(10**6)}", _of(family))


def flush_map(where: Node) -> Done:
    """Fails if the element that was listed has gone, as `flush_chain`."""
    return _delete_element(where, "flush map", "flush")


def delete_element(where: Node) -> Done:
    return _delete_element(where, "delete element of")


def _delete_element(where: Node, what: str, *then: str) -> Done:
    """Delete an element of a map, and do *then*, commands of nft, with the map in the same transaction."""
    found = _pick(where, "map", lambda value: bool(value.get("elem")))
    if not found:
        return NOTHING
    at = {name: found[name] for name in ("family", "table", "name")}
    element = {**at, "elem": [_key(where.rng.choice(found["elem"]))]}
    commands = [{"delete": {"element": element}}, *({command: {"map": at}} for command in then)]
    return _nft(where, json.dumps({"nftables": commands}), _of(found["family"]), "-j",
                what=f"{what} {found['name']}")


def flush_with_iptables(where: Node) -> Done:
    """Delete all rules of table nat with iptables(8), and its chains unless the proxy has repaired them."""
    program = where.rng.choice(("iptables", "ip6tables"))
    flush, family = [program, "-w", "-t", "nat", "-F"], _of("ip6" if "6" in program else "ip")
    flushed = _run(where, flush, f"{program} -t nat -F, -X", family)
    if flushed.since is None:
        return NOTHING
    return flushed._replace(again=_run(where, [*flush[:-1], "-X"], "", family).since)


def restore_with_iptables(where: Node) -> Done:
    """Replace table nat as a script does that restores rules saved at boot."""
    program = where.rng.choice(("iptables", "ip6tables"))
    empty = "*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n"
    command = [f"{program}-restore", "-w"]
    return _run(where, command, command[0], _of("ip6" if "6" in program else "ip"), empty)


def kill_worker(where: Node) -> Done:
    workers = where.proxy.workers()
    if not workers:
        return NOTHING
    since = now()
    try:
        os.kill(where.rng.choice(workers), signal.SIGKILL)
    except ProcessLookupError:
        return NOTHING
    return Done("kill worker", BOTH, since)


def detach_programs(where: Node) -> Done:
    programs = where.rng.sample(PROGRAMS, 3)
    links = next(where.pins.glob("*/links"))
    since = now()
    detach_pins(links, programs)
    return _attached_again(where, links, f"detach {' '.join(programs)}", since)


def remove_pins(where: Node) -> Done:
    links = next(where.pins.glob("*/links"))
    removed = links.with_name("removed")
    since = now()
    links.rename(removed)  # at once: the proxy may pin programs while others are being removed
    shutil.rmtree(removed)
    return _attached_again(where, links, "remove pins", since)


def _attached_again(where: Node, links: Path, what: str, since: Moment) -> Done:
    """Wait until all programs are pinned. Each sync attaches them, without notice in the log."""
    where.proxy.wait_for(
        f"pins after {what}", lambda: all((links / program).exists() for program in PROGRAMS))
    return Done(what, frozenset(), since)


_RULES: Mapping[str, Damage] = {
    "flush ruleset": flush_ruleset,
    "delete table": delete_table,
    "flush table": flush_table,
    "flush chain": flush_chain,
    "delete rule": delete_rule,
    "insert drop rule": insert_rule,
}
_OWN_TABLE: Mapping[str, Damage] = {
    "dormant table": make_table_dormant,
    "add chain": add_chain,
    "flush map": flush_map,
    "delete element": delete_element,
}
_IPTABLES: Mapping[str, Damage] = {
    "iptables -F, -X": flush_with_iptables, "iptables-restore": restore_with_iptables,
}  # fmt: skip
DAMAGES: Mapping[str, Mapping[str, Damage]] = {
    "nftables": {**_RULES, **_OWN_TABLE},
    "iptables": {**_RULES, **_IPTABLES},
    "userspace": {**_RULES, **_IPTABLES, "kill worker": kill_worker},
    "ebpf": {**_RULES, **_OWN_TABLE, "detach programs": detach_programs, "remove pins": remove_pins},
}
"""The damages that concern each mode, by the name in the report."""
UNANNOUNCED = ("detach programs", "remove pins")
"""Damages of which the kernel tells nobody. The rules below serve until the next look finds them."""

WHILE_ENDED: Sequence[Damage] = (flush_ruleset, delete_table, flush_table, flush_chain, delete_rule)
"""Those for a node without a running proxy. A rule that drops would keep it from its API server."""


def _table(where: Node) -> tuple[str, str]:
    tables = _tables(where)
    return where.rng.choice(tables) if tables else ("ip", "none")


def _pick(where: Node, kind: str, fits: Callable[[Json], bool] = lambda _: True) -> Json:
    """Return a random rule or map in the mode's tables; empty without any."""
    values = [value for value in _listed(where, kind) if fits(value)]
    return where.rng.choice(values) if values else {}


def is_ours(mode: str, rule: Json) -> bool:
    """Return whether *rule* is the mode's: it stands in one of its chains, or jumps to one."""
    targets = [part["jump"]["target"] for part in rule["expr"] if "jump" in part]
    return any(
        _owns(mode, rule["table"], chain) or chain in _KEPT.get(mode, ())
        for chain in (rule["chain"], *targets)
    )


def _owns(mode: str, table: str, chain: str) -> bool:
    return mode not in _OWNS or _OWNS[mode](table, chain)


def _tables(where: Node) -> list[tuple[str, str]]:
    """Return family and name of the mode's tables.

    nft 1.0.6 dumps all rules to list tables, and begins again with each change meanwhile: perhaps for ever.
    """
    with where.unchanged():
        lines = [line.split() for line in where.node.run("nft", "list", "tables").splitlines()]
    return [
        (family, name) for _, family, name in lines
        if family in FAMILIES and name in TABLES[where.proxy.mode]
    ]  # fmt: skip


def _listed(where: Node, kind: str) -> list[Json]:
    """Return the objects of *kind* in the mode's tables."""
    found = []
    for table in _tables(where):
        # nft 1.0.6 may fail while the table changes.
        with contextlib.suppress(AssertionError, ValueError), where.unchanged():
            items = json.loads(where.node.run("nft", "-j", "-a", "list", "table", *table))["nftables"]
            found += [item[kind] for item in items if kind in item]
    return found


def _key(element: Any) -> Any:
    return element[0] if isinstance(element, list) else element


def _on(where: Node, found: Json, command: Callable[[str], str], what: str = "") -> Done:
    if not found:
        return NOTHING
    at = f"{found['family']} {found['table']}"
    return _nft(where, command(at), _of(found["family"]), what=what and f"{what} of {at}")


def _nft(where: Node, text: str, families: frozenset[str], *options: str, what: str = "") -> Done:
    """Run nft. It fails if the proxy has deleted the object since it was listed."""
    return _run(where, ["nft", *options, "-f", "-"], what or text, families, text)


def _of(family: str) -> frozenset[str]:
    return frozenset([FAMILIES[family]])


def _run(
    where: Node, command: Sequence[str], what: str, families: frozenset[str], text: str = ""
) -> Done:
    since = now()
    done = subprocess.run(
        ["ip", "netns", "exec", where.node.name, *command],
        input=text, capture_output=True, text=True, check=False)
    return Done(what, families, since) if done.returncode == 0 else NOTHING

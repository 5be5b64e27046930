"""Nodes with neighbours: what `kproxy explain` says about packets there, and what becomes of them."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from kproxy_conformance.network.addresses import NETWORKS, resolve
from kproxy_conformance.network.namespaces import CommandFailed
from kproxy_core.linux import sysctl
from kproxy_core.model.address import Family
from tests.conformance.any_services import Attempt, World
from tests.conformance.test_explained import ExplainedPlay
from tests.core.nft.random_rules import Site
from tests.worlds.neighbours import NEIGHBOURS, Rules
from tests.worlds.packets import DELIVERED, MOST, NOTHING, REFUSED, SENT, Attempted, PacketJudge, Seen

_SYSCTLS: Final = {
    "ipv4": ("net/ipv4/ip_forward", "net/ipv4/conf/all/rp_filter", "net/ipv4/conf/eth0/rp_filter"),
    "ipv6": ("net/ipv6/conf/all/forwarding",)}


_RANDOM: Final = re.compile(
    r"limit|quota|numgen|random|statistic|ct count|meter|length|hash|maxseg|skuid|dscp")
"""Words of rules that depend on more than the packets that are explained."""


def site_of(family: str) -> Site:
    """Return what rules about the topology's node may name."""
    def at(*symbols: str) -> list[str]:
        return [resolve(symbol, family) for symbol in symbols]

    is_ipv4 = family == "ipv4"
    return Site(
        at("client", "crowd5", "pod1", "pod2"), at("node", "node_alt", "node_pods"),
        at("pod1", "pod3", "vip1", "vip2", "ext1", "lb1", "pod4", "vip3"),
        [NETWORKS[name][not is_ipv4] for name in (
            "lan_net", "cluster_net", "local_pod_net", "service_net", "lb_net", "any_net")],
        ["10.244.1.1-10.244.2.13", "172.18.0.1-172.18.0.100"] if is_ipv4 else [
            "fd00:10:244:1::1-fd00:10:244:2::13", "fd00:172:18::1-fd00:172:18::100"],
        ["0.0.255.0 == 0.0.1.0", "255.255.0.0 == 10.244.0.0"] if is_ipv4 else ["0:ffff:: == 0:10::"],
        at("service_net")[0], at("service_net")[0], ("eth0", "eth1", "kcbr0", "kcveth2", "lo"),
        (80, 81, 82, 8080, 8081, 8082, 30000, 30001, 30010, 30011, 30020))


class Verdicts(NamedTuple):
    """How answers compare with packets."""

    counts: Counter[str]
    """Of answers: ``right`` or ``wrong``. ``drawn``: the endpoint decides, ``random``: so does a rule that
    matches at random, ``unclear``: what is not known decides."""
    wrong: list[str]


class WorldPlay(ExplainedPlay):
    """A play beside neighbours."""

    def __init__(self, mode: str, family: str, directory: Path) -> None:
        super().__init__(mode, family, directory)
        self._node = self._stage.topology["node"]
        self._judge = PacketJudge(self._stage.topology, family)
        self._close_stage, self.close = self.close, self._close
        self._programs = {"ipv4": "iptables", "ipv6": "ip6tables"}[family]
        self._rules = ""

    def _close(self) -> None:
        self._judge.close()
        self._close_stage()

    def neighboured(self, random: Random) -> str:
        """Have some neighbours, and some settings of the kernel; return them."""
        names = random.sample(sorted(NEIGHBOURS), random.choice((1, 1, 2, 3)))
        family = Family.IPV4 if self._family == "ipv4" else Family.IPV6
        self._own = self._node.run(f"{self._programs}-save", "-c")
        shown = []
        for name in names:
            rules = NEIGHBOURS[name](random, family, site_of(self._family))
            if self._add(rules):
                shown += [f"# {name}", rules.nft or rules.iptables]
        settings = {}
        for name in _SYSCTLS[self._family]:
            value = 0 if "forward" in name else random.choice((1, 2))
            if random.random() < 0.06:
                settings[name] = value
                self._set(name, value)
        self._rules = "\n".join((*shown, *(f"{name} = {value}" for name, value in settings.items())))
        return self._rules

    def _add(self, rules: Rules) -> bool:
        try:
            if rules.nft:
                self._node.run("nft", "-f", "-", stdin=rules.nft)
            else:
                self._node.run(f"{self._programs}-restore", "--noflush", stdin=rules.iptables)
        except CommandFailed:
            return False
        return True

    def alone(self) -> None:
        """Remove all neighbours."""
        for table in self._node.run("nft", "list", "tables").splitlines():
            _, of, name = table.split()
            if (of in ("inet", "netdev") and name != "judge") or re.fullmatch(r"t\d+", name):
                with suppress(CommandFailed):
                    self._node.run("nft", "delete", "table", of, name)
        if self._own:
            self._node.run(f"{self._programs}-restore", "-c", stdin=self._own)
        for table in ("raw", "mangle", "nat", "filter"):
            if f"*{table}" not in self._own.splitlines():
                for option in ("-F", "-X"):
                    self._node.run(self._programs, "-t", table, option)
                for chain in ("INPUT", "FORWARD", "OUTPUT") if table == "filter" else ():
                    self._node.run(self._programs, "-P", chain, "ACCEPT")
        for name in _SYSCTLS[self._family]:
            self._set(name, 1 if "forward" in name else 0)
        self._stage.barrier.wait()

    def _set(self, name: str, value: int) -> None:
        with self._node.entered():
            sysctl.ensure(name, value)

    def verdicts(self, attempts: Sequence[Attempt]) -> Verdicts:
        """Ask about *attempts*, send their packets, and compare."""
        self._node.forget_connections()
        answers = self.all_explained(attempts[:MOST])
        seen = self._judge.judged([self._attempted(each) for each in attempts[:MOST]])
        counts: Counter[str] = Counter()
        wrong = []
        may_be = "random" if _RANDOM.search(self._rules) else "unclear"
        for attempt, answer, one in zip(attempts[:MOST], answers, seen, strict=True):
            if self._chooses_twice(attempt, answer):
                continue
            is_right = any(_agrees(outcome, answer, one) for outcome in _told(answer))
            verdict = "right" if is_right else "wrong"
            counts[verdict] += 1
            if answer["outcome"] == "depends":
                drawn = all(way["share"] is not None for way in answer["ways"])
                counts["drawn" if drawn else may_be] += 1
                counts[f"{'drawn' if drawn else may_be}: {answer['because']}"] += 1
            if verdict == "wrong":
                wrong.append(f"{attempt}: {one}, but told {answer['outcome']} because {answer['because']} "
                             f"{_endpoints(answer)} {answer['kernel']}")
        return Verdicts(counts, wrong)

    def _chooses_twice(self, attempt: Attempt, answer: dict[str, Any]) -> bool:
        """Return whether a pod is its own endpoint in mode ebpf.

        Its socket leaves that one to the rules, which choose again, and datagrams to itself stay in the pod.
        """
        own = resolve(attempt.client, self._family)
        return self._mode == "ebpf" and attempt.client.startswith("pod") and any(
            host == own for host, _ in _endpoints(answer))

    def _attempted(self, attempt: Attempt) -> Attempted:
        host = "client" if attempt.client == "crowd5" else attempt.client
        return Attempted(
            host, resolve(attempt.client, self._family), resolve(attempt.to, self._family), attempt.port,
            attempt.protocol)


def played(play: WorldPlay, seed: str, answers: int) -> Verdicts:
    """Play worlds until there have been so many *answers*."""
    random = Random(seed)
    world = World(random)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    while counts["right"] + counts["wrong"] < answers:
        play.apply(world)
        if attempts := list(world.attempts()):
            shown = play.neighboured(random)
            found = play.verdicts(attempts)
            play.alone()
            counts += found.counts
            wrong += [f"{shown}\n{each}" for each in found.wrong]
    return Verdicts(counts, wrong)


def _told(answer: dict[str, Any]) -> list[str]:
    return [way["outcome"] for way in answer["ways"]] or [answer["outcome"]]


def _agrees(outcome: str, answer: dict[str, Any], seen: Seen) -> bool:
    """Return whether *seen* is one of the things that *outcome* means."""
    if outcome == "forwarded":
        return seen.kind in (DELIVERED, SENT) and (seen.destination, seen.port) in _endpoints(answer)
    if outcome == "not touched":
        return seen.kind == REFUSED or (seen.destination, seen.port) not in _endpoints(answer)
    return {"refused": REFUSED, "dropped": NOTHING}.get(outcome, seen.kind) == seen.kind


def _endpoints(answer: dict[str, Any]) -> set[tuple[str, int]]:
    told = [each["endpoint"] for each in (answer["kernel"]["endpoints"] or answer["endpoints"])]
    pinned = (answer["affinity"] or {}).get("remembered")
    return set(map(_socket, filter(None, (*told, pinned))))


def _socket(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)

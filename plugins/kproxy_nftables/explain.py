"""Explanation of packets: the rules and elements that they meet, kube-proxy's table included."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from kproxy_core.contract import (
    Address,
    BackendError,
    Family,
    Frontend,
    HostError,
    KernelObject,
    KernelSide,
    NodeView,
    Protocol,
    Question,
    ServicePlan,
    parse_address,
)
from kproxy_core.linux.libnftables import Crashed, list_table
from kproxy_core.linux.rulesets import KUBE_PROXY_TABLE, has_kube_proxy
from kproxy_core.nft.elements import Data, Found
from kproxy_core.nft.listing import HeldTable
from kproxy_core.nft.objects import Chain
from kproxy_core.nft.rules import NF_DROP, NFT_GOTO, Rule, Verdict, rule_text
from kproxy_nftables import skeleton
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import NODE_PORTS, SERVICE_CIDRS, TABLE, VIPS, parse_template
from kproxy_nftables.settings import Settings
from kproxy_nftables.skeleton import all_owned
from kproxy_nftables.walk import TableView, walk
from kproxy_nftables.wanted import elements, node_elements, parse_port_key, port_key, shared_elements

# kube-proxy's table as nft prints it; see docs/design/behaviour/nftables.md. Pure.


KUBE_PROXY_VIPS = ("service-ips", "no-endpoint-services")
KUBE_PROXY_NODE_PORTS = ("service-nodeports", "no-endpoint-nodeports")
_CONTAINER = re.compile(r"^\t(?:set|map) (\S+) \{.*?$(.*?)^\t\}$", re.DOTALL | re.MULTILINE)
_ELEMENTS = re.compile(r"elements = \{(.*)\}", re.DOTALL)
_ASIDE = re.compile(r' (?:comment "[^"]*"|(?:timeout|expires) \S+|counter packets \d+ bytes \d+)')


class KubeProxyTable(TableView):
    """The table of one IP family. It has no set of the ClusterIPs' networks: the rules name them."""

    def __init__(self, rules: Mapping[str, Sequence[str]], text: str) -> None:
        """*rules* are those of each chain in *text*."""
        super().__init__(rules)
        self._elements = {name: dict(_elements(body)) for name, body in _CONTAINER.findall(text)}

    def find(self, container: str, key: bytes) -> Found:
        return self._elements[container][key]

    def keys(self, containers: Sequence[str]) -> Iterator[bytes]:
        """Yield the keys of those *containers* that exist."""
        return chain.from_iterable(self._elements.get(name, ()) for name in containers)


def _elements(body: str) -> Iterator[tuple[bytes, Data]]:
    """Yield the keys and values of a set or a map, from the lines that describe it."""
    found = _ELEMENTS.search(body)
    for element in _ASIDE.sub("", found[1]).split(",") if found else ():
        key, _, value = element.strip().partition(" : ")
        if key:
            yield _key(key.split(" . ")), _verdict(value) if value else None


def _verdict(text: str) -> Verdict:
    word, _, chain = text.partition(" ")
    return Verdict(NFT_GOTO, chain) if word == "goto" else Verdict(NF_DROP)


def _key(parts: Sequence[str]) -> bytes:
    """Return the key that nft prints in *parts*: addresses, then perhaps a protocol and a port."""
    if parts[-1].isdecimal():
        *addresses, protocol, port = parts
        return b"".join(map(parse_address, addresses)) + port_key(Protocol[protocol.upper()], int(port))
    return b"".join(map(parse_address, parts))


# The explanation.

_UNREAD = "a rule that kproxy does not write"
_FEW = 1000
"""Limit for reading single elements: 1,000 questions take as long as all elements of 10,000 Services."""


def explain(questions: Sequence[Question], *, live: bool) -> list[KernelSide]:
    """Return the path of each packet. Raises BackendError or HostError."""
    if not live:
        return [walk(q.packet, q.node, _Written(q.node, q.plan), q.addresses) for q in questions]
    family = questions[0].node.family
    with Kernel() as kernel:
        try:
            table = _kube_proxys(kernel, family) or _InKernel(kernel, questions)
        except Crashed as error:
            unread = KernelObject(f"table {family.ip} {KUBE_PROXY_TABLE}", str(error))
            return [KernelSide((unread,)) for _ in questions]
        return [walk(q.packet, q.node, table, q.addresses) for q in questions]


def frontends(family: Family) -> list[Frontend]:
    """Return the frontends in the maps of the kernel. Raises BackendError or HostError."""
    with Kernel() as kernel:
        if (table := _kube_proxys(kernel, family)) is not None:
            vips, node_ports = table.keys(KUBE_PROXY_VIPS), table.keys(KUBE_PROXY_NODE_PORTS)
        else:
            vips, node_ports = (iter(kernel.elements(family, name)) for name in (VIPS, NODE_PORTS))
        keys = chain(((Address(key[:family.size]), key[family.size:]) for key in vips),
                     ((None, key) for key in node_ports))
        return [Frontend(address, *port) for address, key in keys if (port := parse_port_key(key))]


def _kube_proxys(kernel: Kernel, family: Family) -> KubeProxyTable | None:
    """Return kube-proxy's table if it exists and ours does not. Raises BackendError or HostError."""
    if kernel.has_table(family, TABLE) or not has_kube_proxy(family):
        return None
    text = list_table(family.ip, KUBE_PROXY_TABLE, ["handle_output"])
    return KubeProxyTable(listed_rules(text.splitlines()), text)


class _InKernel(TableView):
    """The kernel's table. Rules are read once, elements on demand."""

    def __init__(self, kernel: Kernel, questions: Sequence[Question]) -> None:
        """Raises BackendError."""
        family = questions[0].node.family
        self._kernel = kernel
        self._family = family
        self._whole = len(questions) > _FEW
        """Read all elements of a container with the first."""
        self._elements: dict[str, dict[bytes, Found]] = {}
        held = kernel.held(family, ())
        if held is None:
            raise BackendError(f"neither table {family.ip} {TABLE} nor {family.ip} {KUBE_PROXY_TABLE} exists")
        super().__init__(_texts(held, questions))

    def find(self, container: str, key: bytes) -> Found:
        if not self._whole or container == SERVICE_CIDRS:
            return self._kernel.element(self._family, container, key)
        if container not in self._elements:
            self._elements[container] = self._kernel.elements(self._family, container)
        return self._elements[container][key]


class _Written(TableView):
    """The table that a sync would write for one plan, or none."""

    def __init__(self, node: NodeView, plan: ServicePlan | None) -> None:
        self._service_cidrs = node.service_cidrs
        plans = [plan] if plan else []
        layout = skeleton.layout(node, skeleton.templates_of(plans), all_owned(plans))
        super().__init__({
            chain.name: [rule_text(rule) for rule in chain.rules]
            for chain in layout.values() if isinstance(chain, Chain)
        })  # fmt: skip
        wanted = node_elements(node)
        for one in plans:
            wanted += elements(one, enumerate(one.cluster_slots), enumerate(one.local_slots))
            wanted += shared_elements(one)
        self._elements = {(container, key): value for container, key, value in wanted}

    def find(self, container: str, key: bytes) -> Found:
        if container == SERVICE_CIDRS and any(Address(key) in cidr for cidr in self._service_cidrs):
            return None
        return self._elements[container, key]


def _texts(held: HeldTable, questions: Sequence[Question]) -> dict[str, list[str]]:
    """Return the rules of each chain in *held* as nft writes them, with handles.

    Rules that a sync would not write for *questions* are listed by libnftables, if it can read our table.
    """
    templates = {template for name in held.chains if (template := parse_template(name)) is not None}
    owned = all_owned(question.plan for question in questions if question.plan is not None)
    node = questions[0].node
    known: dict[str, list[Rule]] = defaultdict(list)
    for counted in (False, True):
        for item in skeleton.layout(node, templates, owned, Settings(counted)).values():
            if isinstance(item, Chain):
                known[item.name] += item.rules
    foreign: dict[int, str] | None = None
    found: dict[str, list[str]] = {}
    for name, rules in held.rules.items():
        found[name] = texts = []
        for rule in rules:
            text = next((rule_text(one) for one in known[name] if rule.equals(one)), _UNREAD)
            shown = f"{text} # handle {rule.handle}"
            if text is _UNREAD:
                foreign = _listed(node.family) if foreign is None else foreign
                shown = foreign.get(rule.handle, shown)
            texts.append(shown)
    return found


def _listed(family: Family) -> dict[int, str]:
    """Return the rules of our table by handle, as libnftables lists them; none if it cannot."""
    try:
        text = list_table(family.ip, TABLE, ["handle_output", "terse_output"])
    except HostError:
        return {}
    rules = chain.from_iterable(listed_rules(text.splitlines()).values())
    return {int(number): rule for rule in rules if (number := rule.rpartition("# handle ")[2]).isdecimal()}


def listed_rules(lines: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    rules: list[str] | None = None
    for line in map(str.strip, lines):
        if line.startswith("chain "):
            rules = found[line.split()[1]] = []
        elif line == "}":
            rules = None
        elif rules is not None and line and not line.startswith("type "):
            rules.append(line)
    return found

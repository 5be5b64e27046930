"""Serves the hook `kproxy_explain`: the rules and elements that packets meet."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

from kproxy_core.backend.api import KernelObject, KernelSide, Question
from kproxy_core.backend.errors import BackendError
from kproxy_core.host.errors import HostError
from kproxy_core.host.libnftables.texts import Crashed, list_table
from kproxy_core.host.nftables.objects import Chain, HeldTable
from kproxy_core.host.nftables.rules import Rule, rule_text
from kproxy_core.model.address import Address, Family
from kproxy_core.model.node import NodeView
from kproxy_core.plan.service_plan import Frontend, ServicePlan
from kproxy_nftables import skeleton
from kproxy_nftables.inspection import kube_proxy
from kproxy_nftables.inspection.kube_proxy import KubeProxyTable
from kproxy_nftables.inspection.walk import Table, walk
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import NODE_PORTS, SERVICE_CIDRS, TABLE, VIPS, parse_template
from kproxy_nftables.owned_chains import all_owned
from kproxy_nftables.skeleton import Extras
from kproxy_nftables.wanted import Value, elements, node_elements, parse_port_key, shared_elements

_UNREAD = "a rule that kproxy does not write"
_FEW = 1000
"""Questions for which single elements are read; 1,000 take as long as all elements of 10,000 Services."""


def explain(questions: Sequence[Question], *, live: bool) -> list[KernelSide]:
    """Return the way of each packet. Raises BackendError or HostError."""
    if not live:
        return [walk(q.packet, q.node, _Written(q.node, q.plan), q.addresses) for q in questions]
    family = questions[0].node.family
    with Kernel() as kernel:
        try:
            table = _kube_proxys(kernel, family) or _InKernel(kernel, questions)
        except Crashed as error:
            unread = KernelObject(f"table {family.ip} {kube_proxy.TABLE}", str(error))
            return [KernelSide((unread,)) for _ in questions]
        return [walk(q.packet, q.node, table, q.addresses) for q in questions]


def frontends(family: Family) -> list[Frontend]:
    """Return the frontends in the maps of the kernel. Raises BackendError or HostError."""
    with Kernel() as kernel:
        if (table := _kube_proxys(kernel, family)) is not None:
            vips, node_ports = table.keys(kube_proxy.VIPS), table.keys(kube_proxy.NODE_PORTS)
        else:
            vips, node_ports = (iter(kernel.elements(family, name)) for name in (VIPS, NODE_PORTS))
        found = [Frontend(Address(key[:family.size]), *parse_port_key(key[family.size:])) for key in vips]
        return found + [Frontend(None, *parse_port_key(key)) for key in node_ports]


def _kube_proxys(kernel: Kernel, family: Family) -> KubeProxyTable | None:
    """Return kube-proxy's table if it alone exists. Raises BackendError or HostError."""
    if kernel.has_table(family, TABLE) or not kernel.has_table(family, kube_proxy.TABLE):
        return None
    text = list_table(family.ip, kube_proxy.TABLE, ["handle_output"])
    return KubeProxyTable(listed_rules(text.splitlines()), text)


class _InKernel(Table):
    """The kernel's table. The rules are read once, elements when they are needed."""

    def __init__(self, kernel: Kernel, questions: Sequence[Question]) -> None:
        """Raises BackendError."""
        family = questions[0].node.family
        self._kernel = kernel
        self._family = family
        self._whole = len(questions) > _FEW
        """Read all elements of a container with the first."""
        self._elements: dict[str, dict[bytes, Value]] = {}
        held = kernel.held(family, ())
        if held is None:
            raise BackendError(f"neither table {family.ip} {TABLE} nor {family.ip} {kube_proxy.TABLE} exists")
        super().__init__(_texts(held, questions))

    def find(self, container: str, key: bytes) -> Value:
        if not self._whole or container == SERVICE_CIDRS:
            return self._kernel.element(self._family, container, key)
        if container not in self._elements:
            self._elements[container] = self._kernel.elements(self._family, container)
        return self._elements[container][key]


class _Written(Table):
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
            wanted += [*elements(one, enumerate(one.cluster), enumerate(one.local)), *shared_elements(one)]
        self._elements = {(container, key): value for container, key, value in wanted}

    def find(self, container: str, key: bytes) -> Value:
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
        for item in skeleton.layout(node, templates, owned, Extras(counted)).values():
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

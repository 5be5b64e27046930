"""Explanation of packets: the rules and elements that they meet, kube-proxy's table included."""

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from typing import Final

from kproxy_core.contract import (
    Address,
    BackendError,
    Destination,
    EndpointShare,
    Family,
    Fate,
    Frontend,
    HostError,
    KernelObject,
    KernelSide,
    NodeView,
    Origin,
    Outcome,
    Question,
    ServicePlan,
    format_address,
    format_socket,
    is_own,
)
from kproxy_core.linux.libnftables import list_table
from kproxy_core.linux.rulesets import KUBE_PROXY_TABLE, has_kube_proxy
from kproxy_core.nft.alike import Example, Names, NoLike, compared_with
from kproxy_core.nft.elements import Element, element_texts
from kproxy_core.nft.expressions import HeldSet, Looked, Ruleset
from kproxy_core.nft.interpret import End, Limits, Program, Result
from kproxy_core.nft.interpret import Fate as KernelFate
from kproxy_core.nft.objects import Chain, Table
from kproxy_core.nft.packet import (
    LOOPBACK,
    NO_INTERFACE,
    RTN_LOCAL,
    RTN_UNICAST,
    Flow,
    Interface,
    Node,
    Number,
    Packet,
    Place,
    Route,
    Seen,
    Status,
)
from kproxy_core.nft.rules import INTEGER, DataType, Rule, Verdict, rule_text
from kproxy_core.nft.ruleset import TableRuleset, WrittenRuleset
from kproxy_nftables import skeleton
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import NODE_PORTS, TABLE, VIPS, Template, parse_template
from kproxy_nftables.settings import DEFAULTS, Settings
from kproxy_nftables.wanted import elements, node_elements, parse_destination, parse_port_key, shared_elements

_VIPS: Final = {TABLE: (VIPS,), KUBE_PROXY_TABLE: ("service-ips", "no-endpoint-services")}
_NODE_PORTS: Final = {
    TABLE: (NODE_PORTS,), KUBE_PROXY_TABLE: ("service-nodeports", "no-endpoint-nodeports")}
"""The maps of frontends. Those of kube-proxy: docs/design/behaviour/nftables.md."""

_FEW = 1000
"""Limit for reading single elements: 1,000 questions take as long as all elements of 10,000 Services."""


def explain(
    questions: Sequence[Question], *, live: bool, settings: Settings = DEFAULTS
) -> list[KernelSide]:
    """Return the path of each packet. Raises BackendError or HostError."""
    node = questions[0].node
    if not live:
        return [_written(question, settings) for question in questions]
    plans = {question.plan.key: question.plan for question in questions if question.plan is not None}.values()
    with Kernel() as kernel:
        table = _serving(kernel, node.family)
        if table is None:
            raise BackendError(
                f"neither table {node.family.ip} {TABLE} nor {node.family.ip} {KUBE_PROXY_TABLE} exists")
        with kernel.ruleset(for_many=len(questions) > _FEW) as ruleset:
            texts = _Texts(Table(node.family, table), ruleset, node, plans, settings)
            ways = _Ways(table, ruleset, texts)
            return [ways.side(question) for question in questions]


def frontends(family: Family) -> list[Frontend]:
    """Return the frontends in the maps of the kernel. Raises BackendError or HostError."""
    with Kernel() as kernel:
        table = _serving(kernel, family) or TABLE
        vips, node_ports = (
            chain.from_iterable(kernel.elements(family, name, table) for name in names[table])
            for names in (_VIPS, _NODE_PORTS))
        keys = chain(((Address(key[:family.size]), key[family.size:]) for key in vips),
                     ((None, key) for key in node_ports))
        return [Frontend(address, *port) for address, key in keys if (port := parse_port_key(key))]


def _serving(kernel: Kernel, family: Family) -> str | None:
    """Return our table if it exists, else kube-proxy's; None without both. Raises HostError, SyncFailed."""
    if kernel.has_table(family, TABLE):
        return TABLE
    return KUBE_PROXY_TABLE if has_kube_proxy(family) else None


def _written(question: Question, settings: Settings) -> KernelSide:
    """Return the path through the table that a sync would write for the plan of *question*, or none."""
    node, plans = question.node, [question.plan] if question.plan else []
    wanted = node_elements(node)
    for one in plans:
        wanted += elements(one, enumerate(one.cluster_slots), enumerate(one.local_slots))
        wanted += shared_elements(one)
    layout = skeleton.layout(node, skeleton.templates_of(plans), skeleton.all_owned(plans), settings)
    table = Table(node.family, TABLE)
    ruleset = WrittenRuleset(table, layout, wanted)
    return _Ways(TABLE, ruleset, _Texts(table, ruleset, node, plans, settings)).side(question)


# The packet's way.

_UPLINK: Final = Interface("?", 2)
"""Of all hosts but pods."""


def _followed(question: Question, program: Program) -> Result:
    """Return what becomes of a packet."""
    packet, node = question.packet, question.node

    def route(address: Address, _mark: Number) -> Route:
        is_local = is_own(address, node, question.addresses)
        return Route(RTN_LOCAL, LOOPBACK) if is_local else Route(RTN_UNICAST, _UPLINK)

    arrived, local = _UPLINK, node.local_source
    if packet.origin is Origin.NODE:
        arrived = NO_INTERFACE
    elif packet.origin is Origin.POD and local is not None and local.cidr is None:
        arrived = Interface(local.interface or f"{local.interface_prefix}0", 3)
    flow = Flow(packet.source, packet.destination, None, packet.port)
    seen = Seen(Packet.of(packet.family, packet.protocol, flow), arrived, NO_INTERFACE,
                is_from_node=packet.origin is Origin.NODE)
    return program.interpret(seen, Node(route))


def _endpoint(end: End) -> Destination | None:
    """Return the endpoint that the packet reaches; None if it ends before, or is not translated."""
    connection, flow = end.seen.connection, end.seen.packet.flow
    if end.place is not None or connection is None or not connection.status & Status.DST_NAT:
        return None
    if flow.destination is None or flow.port is None:
        return None
    return Destination(flow.destination, flow.port)


_OUTCOMES: Final = {KernelFate.DROPPED: Outcome.DROPPED, KernelFate.REJECTED: Outcome.REFUSED}
_Met = Mapping[Place, Iterable[Looked]]
"""Rules, and what they have looked up."""


def _met(ends: Iterable[End]) -> _Met:
    """Return the rules on the ways to *ends*, in their order."""
    met: dict[Place, dict[Looked, None]] = {}
    for one in filter(None, chain.from_iterable(zip_longest(*(end.branch.met for end in ends)))):
        met.setdefault(one.place, {}).update(dict.fromkeys(one.looked))
    return met


def _last(objects: Sequence[KernelObject]) -> str:
    return f"{objects[-1].where}: {objects[-1].text}"


def _names(where: Destination) -> tuple[bytes, bytes]:
    return where.address, where.port.to_bytes(2, "big")


_LIMITS: Final = Limits(rules=1 << 23, numbers=1 << 17)
"""Those of a table that serves Services: each endpoint has a number."""
_MOST_EXAMPLES: Final = 16
"""Of packets by one sender: their ways differ by the templates of Services."""


class _Ways:
    """The ways of packets through one table. Those of a packet like another one are not followed again."""

    def __init__(self, table: str, ruleset: Ruleset, texts: "_Texts") -> None:
        self._ruleset = ruleset
        self._texts = texts
        self._for_strangers = Program(TableRuleset(table, ruleset), _LIMITS)
        self._as_known = Program(TableRuleset(table, ruleset, remembers=True), _LIMITS)
        self._examples: dict[Hashable, list[tuple[Example, KernelSide, _Met]]] = {}
        self._constants: dict[Place, Collection[bytes] | None] = {}

    def side(self, question: Question) -> KernelSide:
        """Return the way of a packet. Raises OSError."""
        packet = question.packet

        def is_local(address: bytes) -> bool:
            return is_own(Address(address), question.node, question.addresses)

        names = packet.source, packet.destination, packet.port.to_bytes(2, "big")
        examples = self._examples.setdefault((packet.origin, packet.source, packet.protocol), [])
        for example, side, met in examples:
            if (found := example.compare(names, is_local)) is not None:
                return self._renamed(side, met, *found)
        result = _followed(question, self._for_strangers)
        doubtful = {doubt.place for end in result.ends for case in end.branch.chance.cases for doubt in case}
        pinned = self._pinned(question, result)
        met = _met([*result.ends, *pinned])
        objects = self._texts.objects(met, doubtful)
        side = KernelSide(objects, None if doubtful else self._fate(result.ends, objects),
                          next(filter(None, map(_endpoint, pinned)), None))
        if side.fate is not None and (new := self._example(packet.family, names, result)):
            known = new.compare(names, is_local)
            reached = (name for choice in side.fate.choices for name in _names(choice.where))
            if known and all(name in known[0] for name in reached):
                examples.insert(0, (new, side, met))
                del examples[_MOST_EXAMPLES:]
        return side

    def _pinned(self, question: Question, result: Result) -> Sequence[End]:
        """Return the ends of the packet if sets that packets fill know its client; none if they do not."""
        held = {one.container: self._texts.held_set(one.container) for one in result.looked}
        filled = {name for name, each in held.items() if each is not None and each.is_filled_by_packets}
        if not filled:
            return ()
        known = _followed(question, self._as_known)
        is_known = any(one.container in filled and one.element is not None for one in known.looked)
        return known.ends if is_known else ()

    def _fate(self, ends: Sequence[End], objects: Sequence[KernelObject]) -> Fate:
        choices: dict[Destination, EndpointShare] = {}
        for end in ends:
            if (where := _endpoint(end)) is not None and end.seen.connection is not None:
                share = end.share + (choices[where].share if where in choices else 0)
                is_masqueraded = bool(end.seen.connection.status & Status.SRC_NAT)
                choices[where] = EndpointShare(where, share, is_masqueraded)
        if choices:
            return Fate(Outcome.FORWARDED, _last(objects), tuple(choices.values()))
        for end in ends:
            if end.place is not None and end.fate in _OUTCOMES:
                return Fate(_OUTCOMES[end.fate], f"chain {end.place.chain}: {self._texts.rule(end.place)}")
        return Fate(Outcome.UNTOUCHED, "no rule applies")

    def _example(self, family: Family, names: Sequence[bytes], result: Result) -> Example | None:
        """Return a packet as an example for others; None if rules may treat any other one differently."""
        found: set[bytes] = set()
        for place in result.rules:
            if place not in self._constants:
                self._constants[place] = self._constants_of(place, family)
            if (known := self._constants[place]) is None:
                return None
            found.update(known)
        with suppress(NoLike):
            return Example(names, result.looked, self._texts.held_set, found)
        return None

    def _constants_of(self, place: Place, family: Family) -> Collection[bytes] | None:
        assert place.rule is not None
        rule = self._ruleset.rules(place.family, place.table, place.chain)[place.rule - 1]
        with suppress(NoLike):
            return compared_with(rule.expressions, family)
        return None

    def _renamed(
        self, side: KernelSide, met: _Met, names: Names, lookups: Mapping[Looked, Looked]
    ) -> KernelSide:
        """Return the way of a packet that is like the one of *side*."""
        assert side.fate is not None
        objects = self._texts.objects({place: [lookups[one] for one in met[place]] for place in met})
        if not side.fate.choices:
            return KernelSide(objects, side.fate)
        choices = tuple(
            choice._replace(where=Destination(Address(names[address]), int.from_bytes(names[port], "big")))
            for choice in side.fate.choices for address, port in [_names(choice.where)])
        return KernelSide(objects, Fate(side.fate.outcome, _last(objects), choices))


class _Texts:
    """Rules and elements of one table as text, for the eye."""

    def __init__(
        self, table: Table, ruleset: Ruleset, node: NodeView, plans: Iterable[ServicePlan],
        settings: Settings,
    ) -> None:
        self._table = table
        self._ruleset = ruleset
        self._node = node
        self._plans = plans
        self._settings = settings
        self._rules: dict[Place, str] = {}
        self._keys: dict[tuple[Sequence[DataType], bytes], str] = {}
        self._known: dict[str, list[Rule]] = {}
        self._listed: Mapping[int, str] | None = None
        self._problem: tuple[KernelObject, ...] = ()

    def held_set(self, name: str) -> HeldSet | None:
        return self._ruleset.held_set(self._table.family.ip, self._table.name, name)

    def objects(self, met: _Met, doubtful: Collection[Place | None] = ()) -> tuple[KernelObject, ...]:
        """Return the rules that were met, and the elements that these have found."""
        found: list[KernelObject] = []
        for place, looked in met.items():
            doubt = "  (not understood)" if place in doubtful else ""
            rule = KernelObject(f"chain {place.chain}", self.rule(place) + doubt)
            if not looked:
                found.append(rule)
                continue
            shown = dict.fromkeys(self._elements(looked))
            found += [each for each in shown if each.where.startswith("set ")]
            found.append(rule)
            found += [each for each in shown if not each.where.startswith("set ")]
        return (*self._problem, *found)

    def _elements(self, looked: Iterable[Looked]) -> Iterator[KernelObject]:
        """Yield what a rule has found. An endpoint of several numbers is named once, with their count."""
        slots: list[tuple[int, str, Looked]] = []
        for one in looked:
            held = self.held_set(one.container)
            if held is None or one.container.startswith("__"):  # That of the rule alone, whose text has it.
                continue
            if held.types[-1:] == (INTEGER,):
                number = int.from_bytes(one.key[-INTEGER.size:], sys.byteorder)
                slots.append((number, self._key(held.types[:-1], one.key[:-INTEGER.size]), one))
            elif one.element is not None:
                yield _element(one, self._key(held.types, one.key))
        if slots:
            same = Counter(one.element and one.element.data for _, _, one in slots)
            for number, key, one in sorted(slots, key=lambda slot: slot[0]):
                count = same[one.element.data] if one.element is not None else 1
                yield _element(one, f"{key} . {number if count == 1 else f'({count} of {len(slots)})'}")

    def _key(self, types: Sequence[DataType], key: bytes) -> str:
        if (known := self._keys.get((types, key))) is None:
            known = next(element_texts(types, (), [Element(key)]), "") or key.hex()
            self._keys[types, key] = known
        return known

    def rule(self, place: Place) -> str:
        """Return the rule at *place* as nft writes it, with its handle if it has one."""
        if place not in self._rules:
            self._rules[place] = self._rule(place)
        return self._rules[place]

    def _rule(self, place: Place) -> str:
        assert place.rule is not None
        held = self._ruleset.rules(place.family, place.table, place.chain)[place.rule - 1]
        known = self._rules_of(place.chain) if self._table.name == TABLE else ()
        text = next((rule_text(rule) for rule in known if held.equals(rule)), "")
        text = text or self._text_of(place.handle)
        return f"{text} # handle {place.handle}" if place.handle else text

    def _rules_of(self, chain: str) -> Sequence[Rule]:
        """Return the rules of *chain* that a sync would write."""
        if not self._known:
            self._learn(skeleton.templates_of(self._plans), skeleton.all_owned(self._plans))
        if chain not in self._known and (template := parse_template(chain)):
            self._learn([template], {})
        return self._known.get(chain, ())

    def _learn(self, templates: Collection[Template], owned: skeleton.Owned) -> None:
        found: dict[str, list[Rule]] = defaultdict(list)
        for counted in (False, True):
            settings = self._settings._replace(counted=counted)
            for item in skeleton.layout(self._node, templates, owned, settings).values():
                if isinstance(item, Chain):
                    found[item.name] += item.rules
        self._known |= found

    def _text_of(self, handle: int) -> str:
        """Return a rule as libnftables lists it."""
        if self._listed is None:
            family, name = self._table.family.ip, self._table.name
            try:
                text = list_table(family, name, ["handle_output", "terse_output"])
            except HostError as error:
                text, self._problem = "", (KernelObject(f"table {family} {name}", str(error)),)
            lines = (line.strip().rpartition(" # handle ") for line in text.splitlines())
            self._listed = {int(number): rule for rule, _, number in lines if number.isdecimal()}
        return self._listed.get(handle, "a rule that kproxy does not write")


def _element(found: Looked, key: str) -> KernelObject:
    if found.element is None:
        return KernelObject(f"map {found.container}", f"{key}  (missing)")
    data = found.element.data
    if data is None:
        return KernelObject(f"set {found.container}", key)
    return KernelObject(f"map {found.container}", f"{key} : {_data_text(data)}")


def _data_text(data: bytes | Verdict) -> str:
    if isinstance(data, Verdict):
        return data.text
    return format_address(Address(data)) if len(data) in (4, 16) else format_socket(*parse_destination(data))

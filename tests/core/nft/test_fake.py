"""The kernel in memory answers, lists and announces what Linux does, request by request."""

import errno
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kproxy_conformance.network.namespaces import Namespace
from kproxy_core.model.address import parse_cidr
from kproxy_core.netlink import messages as netlink
from kproxy_core.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NetlinkRequest,
    attribute,
    attribute_spans,
    attributes,
    message,
    nested,
    text_attribute,
    u32_attribute,
)
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft import fake
from kproxy_core.nft.elements import Element, element_list, elements_of, encode_element
from kproxy_core.nft.fake import FakeKernel
from kproxy_core.nft.messages import (
    DELSETELEM,
    GETCHAIN,
    GETOBJ,
    GETRULE,
    GETSET,
    GETSETELEM,
    GETTABLE,
    NEWSETELEM,
    transaction,
)
from kproxy_core.nft.rules import NFT_JUMP, Verdict
from kproxy_core.nft.watch import COMMITS_GROUP

Answer = tuple[Any, ...]

_IP = 2
_NONREC, _APPEND = 0x100, 0x800
_LISTS = (GETTABLE, GETCHAIN, GETRULE, GETSET, GETOBJ)


def read(sock: NetlinkSocket) -> Iterator[Answer]:
    """Yield what *sock* has received, without what differs from kernel to kernel or by the time."""
    for data in iter(sock.receive, b""):
        for kind, flags, sequence, start, end in netlink.messages(data):
            if kind in (netlink.NLMSG_ERROR, netlink.NLMSG_DONE):
                yield kind, flags, sequence, data[start : start + 4]
                continue
            body = data[start + NFGENMSG.size : end]
            found: dict[int, Any] = attributes(body)
            order = [each for each, _, _ in attribute_spans(body, 0, len(body))]
            if kind == fake.NEWSET:
                found.pop(19, None)  # NFTA_SET_TYPE: an address in the kernel, since 6.18.
                order = [each for each in order if each != 19]
            elif kind == fake.NEWGEN:
                found = {1: found[1]}  # Without the process.
            elif kind in (NEWSETELEM, DELSETELEM):
                listed = found[3]
                found[3] = frozenset(
                    tuple((k, v) for k, v in attributes(listed, first, last).items() if k != 5)
                    for _, first, last in attribute_spans(listed, 0, len(listed))
                )
                if not found[3]:
                    continue
            yield kind, flags, sequence, data[start : start + NFGENMSG.size], tuple(order), found


def _joined(announced: Iterator[Answer]) -> Iterator[Answer]:
    """Join neighbours that are about elements of one set: a hash table is flushed in any order."""
    for (kind, flags, name), group in groupby(announced, key=lambda each: (*each[:2], each[5].get(2))):
        if kind in (NEWSETELEM, DELSETELEM):
            yield kind, flags, name, sorted(sorted(each) for one in group for each in one[5][3])
        else:
            # Elements are counted while the commit is under way (NFTA_SET_COUNT).
            yield from ((*each[:5], {k: v for k, v in each[5].items() if k != 20}) for each in group)


class Room:
    """A kernel, with a socket that writes, one of another process, and one that listens."""

    def __init__(self, cleanup: ExitStack) -> None:
        self._cleanup = cleanup
        self.writer, self.other = (self.open() for _ in range(2))
        self.listener = self.open(groups=[COMMITS_GROUP], receive_space=8 << 20)

    def open(self, **options: Any) -> NetlinkSocket:
        return self._cleanup.enter_context(NetlinkSocket.open(NETLINK_NETFILTER, **options))

    def run(
        self, requests: Sequence[NetlinkRequest], *, commit: bool = True, by: str = "writer"
    ) -> list[Answer]:
        """Return answers, notifications and listings."""
        sock: NetlinkSocket = getattr(self, by)
        sock._socket.send(transaction(requests, commit=commit)[0])
        return [*read(sock), *self.seen()]

    def ask(self, kind: int, flags: int, body: bytes) -> list[Answer]:
        self.writer._socket.send(message(kind, flags, body, 7))
        return list(read(self.writer))

    def seen(self) -> list[Answer]:
        found = list(_joined(read(self.listener)))
        containers = []
        for kind in _LISTS:
            listed = self.ask(kind, NLM_F_DUMP, NFGENMSG.pack(0, 0, 0))
            found += listed
            if kind == GETSET:
                containers = [
                    (each[3][0], each[5][1], each[5][2]) for each in listed if each[0] == fake.NEWSET
                ]
        for family, table, name in containers:
            of = NFGENMSG.pack(family, 0, 0) + attribute(1, table) + attribute(2, name)
            merged = set[Any]()
            for each in self.ask(GETSETELEM, NLM_F_DUMP, of):
                if each[0] == NEWSETELEM:
                    merged |= each[5][3]
            found.append((name, frozenset(merged)))
        return found


def play(is_real: bool, act: Callable[[Room], list[Any]]) -> list[Any]:
    with ExitStack() as cleanup:
        if is_real:
            cleanup.enter_context(cleanup.enter_context(closing(Namespace("fake"))).entered())
        else:
            cleanup.enter_context(FakeKernel())
        return act(Room(cleanup))


def request(kind: int, flags: int, *body: bytes, family: int = _IP) -> NetlinkRequest:
    return NetlinkRequest(kind, flags, NFGENMSG.pack(family, 0, 0) + b"".join(body))


NAMED = text_attribute(1, "t")


def table(flags: int = 0, how: int = NLM_F_CREATE, name: str = "t", *more: bytes) -> NetlinkRequest:
    return request(fake.NEWTABLE, how, text_attribute(1, name), u32_attribute(2, flags), *more)


def chain(name: str, how: int = NLM_F_CREATE, *more: bytes) -> NetlinkRequest:
    return request(fake.NEWCHAIN, how, NAMED, text_attribute(3, name), *more)


def hook(number: int, priority: int = 0, type_: str = "filter") -> bytes:
    at = nested(4, u32_attribute(1, number), attribute(2, struct.pack(">i", priority)))
    return at + text_attribute(7, type_)


def expression(name: str, *parts: bytes) -> bytes:
    return nested(1, text_attribute(1, name), nested(2, *parts))


def verdict(code: int, to: str = "") -> bytes:
    return expression("immediate", u32_attribute(1, 0), attribute(2, Verdict(code, to).encode()))


def lookup(name: str, *, verdicts: bool = False) -> bytes:
    target = [u32_attribute(3, 0)] if verdicts else []
    load = expression("payload", *(u32_attribute(kind, value) for kind, value in enumerate((1, 1, 12, 4), 1)))
    return load + expression("lookup", text_attribute(1, name), u32_attribute(2, 1), *target)


def rule(
    of: str, *expressions: bytes, how: int = NLM_F_CREATE | _APPEND, more: bytes = b""
) -> NetlinkRequest:
    return request(fake.NEWRULE, how, NAMED, text_attribute(2, of), nested(4, *expressions), more)


def container(
    name: str, flags: int = 0, how: int = NLM_F_CREATE, key: int = 4, *more: bytes
) -> NetlinkRequest:
    return request(
        fake.NEWSET,
        how,
        NAMED,
        text_attribute(2, name),
        u32_attribute(3, flags),
        u32_attribute(4, 7),
        u32_attribute(5, key),
        u32_attribute(10, 1),
        *more,
    )


def elements(name: str, *given: Element, kind: int = NEWSETELEM, how: int = NLM_F_CREATE) -> NetlinkRequest:
    return request(kind, how, NAMED, text_attribute(2, name), element_list(*map(encode_element, given)))


def delete(kind: int, name: str = "", how: int = 0, *more: bytes) -> NetlinkRequest:
    at = 3 if kind == fake.DELCHAIN else 2
    return request(kind, how, NAMED, *([text_attribute(at, name)] if name else []), *more)


def key(number: int) -> bytes:
    return struct.pack(">I", number)


def networks(*given: str) -> list[Element]:
    return [each for one in given for each in elements_of(parse_cidr(one))]


VERDICTS = u32_attribute(6, 0xFFFFFF00) + u32_attribute(7, 16)
SIZED = nested(9, u32_attribute(1, 2))
PAIR = nested(9, nested(2, *(nested(1, u32_attribute(1, 4)) for _ in range(2))))
COUNTER = text_attribute(1, "counter") + nested(2, attribute(1, bytes(8)), attribute(2, bytes(8)))
DROPS, JUMPS = verdict(0), verdict(NFT_JUMP, "x")
BASE = [table(), chain("x"), chain("b", NLM_F_CREATE, hook(1))]
ONE, TWO, THREE = (Element(key(n)) for n in (1, 2, 3))
AN_INTERVAL = [Element(key(10)), Element(key(20), is_end=True)]

Steps = Sequence[Sequence[NetlinkRequest]]

CASES: dict[str, Steps] = {
    "tables": [
        [table()],
        [table()],
        [table(how=NLM_F_EXCL)],
        [table(how=NLM_F_REPLACE)],
        [table(1)],
        [table(0)],
        [table(8)],
        [table(name="u")],
        [delete(fake.DELTABLE)],
        [delete(fake.DELTABLE)],
    ],
    "a table deleted and made again": [BASE, [delete(fake.DELTABLE), *BASE]],
    "notes of a table": [[table(0, NLM_F_CREATE, "t", attribute(6, b"\0\3hi\0"))]],
    "a table in use": [BASE, [delete(fake.DELTABLE, "", _NONREC)], [delete(fake.DELTABLE)]],
    "all tables": [BASE, [table(name="u")], [request(fake.DELTABLE, 0)]],
    "owned tables": [[table(2)], [chain("x")], [table(0)], [table(6)]],
    "games with dormant": [BASE, [table(1), table(0)], [table(1), table(0), table(1)]],
    "an error among others": [
        BASE,
        [chain("y"), delete(fake.DELCHAIN, "z"), delete(fake.DELSET, "z"), chain("w")],
    ],
    "errors use handles": [BASE, [chain("y"), delete(fake.DELCHAIN, "z")], [chain("y")]],
    "unknown kinds": [BASE, [request(0xA30, 0, NAMED)], [request(0x101, 0, NAMED)]],
    "without names": [
        [request(fake.NEWTABLE, NLM_F_CREATE)],
        BASE,
        [request(fake.NEWCHAIN, NLM_F_CREATE, NAMED)],
        [request(fake.NEWRULE, NLM_F_CREATE, NAMED)],
        [request(fake.DELSET, 0, NAMED)],
    ],
    "chains": [
        BASE,
        [chain("x")],
        [chain("x", NLM_F_EXCL)],
        [chain("x", NLM_F_REPLACE)],
        [chain("y", NLM_F_CREATE, u32_attribute(5, 1))],
        [chain("x", NLM_F_CREATE, u32_attribute(5, 1))],
        [chain("b", NLM_F_CREATE, u32_attribute(5, 0))],
        [chain("b", NLM_F_CREATE, u32_attribute(5, 7))],
        [chain("b", NLM_F_CREATE, hook(1))],
        [chain("b", NLM_F_CREATE, hook(2))],
        [chain("b", NLM_F_CREATE, hook(1, 7))],
        [chain("x", NLM_F_CREATE, hook(1))],
    ],
    "hooks": [
        [table()],
        *(
            [chain(f"c{type_}{number}", NLM_F_CREATE, hook(number, priority, type_))]
            for number, priority, type_ in (
                (7, 0, "filter"),
                (0, 0, "nat"),
                (2, 0, "nat"),
                (1, -200, "nat"),
                (3, 0, "route"),
                (0, 0, "route"),
                (0, 0, "what"),
            )
        ),
    ],
    "another type of chain": [
        [table(), chain("c", NLM_F_CREATE, hook(1))],
        [chain("c", NLM_F_CREATE, hook(1, 0, "nat"))],
    ],
    "chains deleted": [
        [*BASE, rule("b", JUMPS)],
        [delete(fake.DELCHAIN, "x")],
        [delete(fake.DELCHAIN, "b", _NONREC)],
        [delete(fake.DELCHAIN, "b")],
        [delete(fake.DELCHAIN, "x")],
        [delete(fake.DELCHAIN, "x")],
    ],
    "rules": [
        [*BASE, rule("x", DROPS), rule("x", verdict(-5)), rule("x", verdict(1), how=NLM_F_CREATE)],
        [rule("x", DROPS, how=0)],
        [rule("x", DROPS, how=NLM_F_CREATE | NLM_F_REPLACE)],
        [rule("z", DROPS)],
        [rule("x", verdict(99))],
        [rule("x", verdict(NFT_JUMP, "z"))],
        [rule("x", verdict(NFT_JUMP, "b"))],
        [rule("x", verdict(NFT_JUMP))],
        [rule("x", expression("what"))],
        [delete(fake.DELRULE, "z")],
        [delete(fake.DELRULE, "x")],
        [rule("x", DROPS)],
        [delete(fake.DELRULE)],
    ],
    "rules by handle": [
        [*BASE, *(rule("x", DROPS, more=attribute(7, bytes([n]))) for n in range(3))],
        *(
            [rule("x", verdict(-5), how=how, more=attribute(kind, struct.pack(">Q", 4)))]
            for kind, how in (
                (6, NLM_F_CREATE),
                (6, NLM_F_CREATE | _APPEND),
                (3, NLM_F_REPLACE),
                (3, NLM_F_EXCL),
                (3, NLM_F_CREATE),
            )
        ),
        [delete(fake.DELRULE, "x", 0, attribute(3, struct.pack(">Q", 4)))],
        [delete(fake.DELRULE, "x", 0, attribute(3, struct.pack(">Q", 4)))],
        [rule("x", DROPS, more=attribute(6, struct.pack(">Q", 99)))],
    ],
    "expressions": [
        [*BASE, container("d", 48, NLM_F_CREATE, 4, attribute(11, struct.pack(">Q", 5000)))],
        *(
            [rule("b", each)]
            for each in (
                expression("counter"),
                expression("limit", attribute(1, struct.pack(">Q", 5)), attribute(2, struct.pack(">Q", 1))),
                expression("meta", u32_attribute(1, 8), u32_attribute(2, 3)),
                expression("meta", u32_attribute(1, 9), u32_attribute(2, 3)),
            expression("meta", u32_attribute(1, 12), u32_attribute(2, 3)),
                expression("ct", u32_attribute(1, 1), u32_attribute(2, 0)),
                expression("fib", u32_attribute(1, 1), u32_attribute(2, 3), u32_attribute(3, 2)),
                expression("numgen", u32_attribute(1, 1), u32_attribute(2, 5), u32_attribute(3, 1)),
                expression("meta", u32_attribute(1, 1), u32_attribute(2, 3))
                + expression(
                    "bitwise",
                    u32_attribute(1, 1),
                    u32_attribute(2, 1),
                    u32_attribute(3, 4),
                    nested(4, attribute(1, bytes(4))),
                    nested(5, attribute(1, bytes(4))),
                ),
                expression("meta", u32_attribute(1, 1), u32_attribute(2, 3))
                + expression(
                    "hash",
                    u32_attribute(1, 1),
                    u32_attribute(2, 2),
                    u32_attribute(3, 4),
                    u32_attribute(4, 5),
                    u32_attribute(5, 9),
                ),
                expression("meta", u32_attribute(1, 1), u32_attribute(2, 3))
                + expression(
                    "cmp", u32_attribute(1, 1), u32_attribute(2, 0), nested(3, attribute(1, bytes(4)))
                ),
                expression("reject", u32_attribute(1, 0), attribute(2, b"\3")),
                expression("notrack"),
                expression("masq"),
                expression("redir"),
                expression("meta", u32_attribute(1, 1), u32_attribute(2, 3))
                + expression("dynset", text_attribute(1, "d"), u32_attribute(3, 1), u32_attribute(4, 1)),
                expression("meta", u32_attribute(1, 1), u32_attribute(2, 3))
                + expression(
                    "dynset",
                    text_attribute(1, "d"),
                    u32_attribute(3, 1),
                    u32_attribute(4, 1),
                    nested(7, COUNTER),
                ),
                lookup("nothing"),
            )
        ),
    ],
    "places of translations": [
        [table(), chain("n", NLM_F_CREATE, hook(4, 100, "nat")), chain("f", NLM_F_CREATE, hook(4))],
        [rule("n", expression("masq"))],
        [rule("f", expression("masq"))],
        [rule("n", expression("redir"))],
        [chain("x"), rule("x", expression("redir"))],
        [rule("n", JUMPS)],
        [rule("n", JUMPS), chain("y")],
    ],
    "a base chain after a switch": [
        BASE,
        [table(1), chain("c", NLM_F_CREATE, hook(1))],
        [table(1), chain("y")],
        [table(1), chain("c", NLM_F_CREATE, hook(1))],
        [delete(fake.DELTABLE), *BASE, table(1), delete(fake.DELTABLE), *BASE],
    ],
    "as many jumps as the kernel takes, and one more": [
        [*BASE, *(chain(f"c{n}") for n in range(17)), rule("b", verdict(NFT_JUMP, "c0"))],
        [rule(f"c{n}", verdict(NFT_JUMP, f"c{n + 1}")) for n in range(14)],
        [rule("c14", verdict(NFT_JUMP, "c15"))],
        [rule("c15", verdict(NFT_JUMP, "c16"))],
    ],
    "a loop": [BASE, [rule("x", JUMPS)], [rule("b", JUMPS), chain("y")]],
    "a chain that jumps to itself": [[*BASE, rule("x", JUMPS)], [delete(fake.DELCHAIN, "x")]],
    "a loop of two": [
        [*BASE, chain("y"), rule("y", JUMPS)],
        [rule("b", JUMPS), rule("x", verdict(NFT_JUMP, "y"))],
    ],
    "sets": [
        [*BASE, container("s")],
        [container("s")],
        [container("s", how=NLM_F_EXCL)],
        [container("s", how=NLM_F_REPLACE)],
        [container("s", key=2)],
        [container("s", 4)],
        [container("n", how=0)],
        [container("n", key=0)],
        [container("n", key=65)],
        [container("n", 8)],
        [container("n", 0, NLM_F_CREATE, 4, VERDICTS)],
        [container("n", 1 << 20)],
        [container("n", 0, NLM_F_CREATE, 4, attribute(11, struct.pack(">Q", 1000)))],
        [container("n", 128)],
        [rule("x", lookup("s"))],
        [delete(fake.DELSET, "s")],
        [rule("x", lookup("s", verdicts=True))],
        [delete(fake.DELRULE, "x"), delete(fake.DELSET, "s")],
        [delete(fake.DELSET, "s")],
    ],
    "elements": [
        [*BASE, container("s")],
        [elements("s", ONE, TWO)],
        [elements("s", ONE)],
        [elements("s", ONE, how=NLM_F_EXCL | NLM_F_CREATE)],
        [elements("s", ONE, how=0)],
        [elements("s", THREE, ONE, kind=DELSETELEM)],
        [elements("s", ONE, kind=DELSETELEM)],
        [elements("s", Element(b"1"))],
        [elements("s", Element(key(7), key(7)))],
        [elements("s", Element(key(7), is_end=True))],
        [elements("s", Element(key(7), timeout=1000))],
        [elements("s", Element(b""))],
        [elements("s", Element(b""), kind=DELSETELEM)],
        [elements("z", ONE)],
        [elements("z", ONE, kind=DELSETELEM)],
        [delete(fake.DELSET, "s", _NONREC)],
        [delete(DELSETELEM, "s")],
        [delete(DELSETELEM, "s")],
        [delete(NEWSETELEM, "s", NLM_F_CREATE)],
        [elements("s", Element(key(7), expressions=(COUNTER,)))],
    ],
    "a full set": [
        [*BASE, container("s", 0, NLM_F_CREATE, 4, SIZED)],
        [elements("s", ONE, TWO)],
        [elements("s", THREE)],
        [elements("s", TWO)],
        [elements("s", ONE, kind=DELSETELEM), elements("s", THREE)],
        [elements("s", Element(b""))],
        [elements("s", ONE)],
    ],
    "a full set of intervals": [
        [*BASE, container("s", 4, NLM_F_CREATE, 4, SIZED)],
        [elements("s", *networks("10.0.0.0/8", "11.0.0.0/8", "12.0.0.0/8"))],
        [elements("s", *networks("10.0.0.0/8", "11.0.0.0/8"))],
        [elements("s", *networks("12.0.0.0/8"))],
    ],
    "intervals": [
        [*BASE, container("s", 4)],
        [elements("s", *AN_INTERVAL)],
        [elements("s", *AN_INTERVAL)],
        [elements("s", Element(key(20)), Element(key(30), is_end=True))],
        [elements("s", Element(key(5)), Element(key(10), is_end=True))],
        [elements("s", Element(key(15)), Element(key(18), is_end=True))],
        [elements("s", Element(key(1)), Element(key(40), is_end=True))],
        [elements("s", Element(key(12)))],
        [elements("s", *AN_INTERVAL, kind=DELSETELEM)],
        [elements("s", *AN_INTERVAL, kind=DELSETELEM)],
    ],
    "maps": [
        [*BASE, container("v", 8, NLM_F_CREATE, 4, VERDICTS)],
        [elements("v", Element(key(1), Verdict(NFT_JUMP, "x")))],
        [elements("v", Element(key(1), Verdict(NFT_JUMP, "x")))],
        [elements("v", Element(key(1), Verdict(0)))],
        [elements("v", Element(key(2), key(1)))],
        [elements("v", TWO)],
        [elements("v", Element(key(2), Verdict(NFT_JUMP, "z")))],
        [elements("v", Element(key(2), Verdict(NFT_JUMP, "b")))],
        [elements("v", Element(b"", Verdict(0)))],
        [delete(fake.DELCHAIN, "x")],
        [rule("b", lookup("v", verdicts=True))],
        [elements("v", Element(key(1)), kind=DELSETELEM)],
        [delete(fake.DELCHAIN, "x")],
        [delete(fake.DELSET, "v")],
    ],
    "a loop by a map": [
        [
            *BASE,
            container("v", 8, NLM_F_CREATE, 4, VERDICTS),
            rule("b", lookup("v", verdicts=True)),
            rule("x", lookup("v", verdicts=True)),
        ],
        [elements("v", Element(key(1), Verdict(NFT_JUMP, "x")))],
    ],
    "a map of values": [
        [*BASE, container("m", 8, NLM_F_CREATE, 4, u32_attribute(6, 13), u32_attribute(7, 2))],
        [elements("m", Element(key(1), b"\0\1"))],
        [elements("m", Element(key(1), b"\0\2"))],
        [elements("m", Element(key(2), b"\0"))],
        [elements("m", Element(key(2), Verdict(0)))],
    ],
    "concatenations": [
        [*BASE, container("c", 132, NLM_F_CREATE, 8, PAIR)],
        [elements("c", Element(key(1) + key(1), last=key(5) + key(5)))],
        [elements("c", Element(key(1) + key(1), last=key(5) + key(5)))],
        [elements("c", Element(key(2) + key(2), last=key(3) + key(3)))],
        [elements("c", Element(key(1) + key(7), last=key(5) + key(9)))],
        [elements("c", Element(key(1) + key(1), last=key(5) + key(5)), kind=DELSETELEM)],
    ],
    "timeouts": [
        [*BASE, container("s", 16, NLM_F_CREATE, 4, attribute(11, struct.pack(">Q", 5000000)))],
        [elements("s", ONE, Element(key(2), timeout=7000000))],
        [elements("s", ONE)],
    ],
    "elements with counters": [
        [*BASE, container("s", 0, NLM_F_CREATE, 4, nested(17, COUNTER))],
        [elements("s", ONE)],
        [elements("s", Element(key(2), expressions=(COUNTER,)))],
    ],
    "objects": [
        [
            *BASE,
            request(fake.NEWOBJ, NLM_F_CREATE, NAMED, text_attribute(2, "o"), u32_attribute(3, 1), nested(4)),
        ],
        [rule("x", expression("objref", u32_attribute(1, 1), text_attribute(2, "o")))],
        [rule("x", expression("objref", u32_attribute(1, 1), text_attribute(2, "p")))],
        [delete(fake.DELOBJ, "o", 0, u32_attribute(3, 1))],
        [delete(fake.DELRULE, "x")],
        [request(fake.NEWOBJ, NLM_F_CREATE, NAMED, text_attribute(2, "o"), u32_attribute(3, 1), nested(4))],
        [request(fake.NEWOBJ, NLM_F_EXCL, NAMED, text_attribute(2, "o"), u32_attribute(3, 1), nested(4))],
        [delete(fake.DELOBJ, "o")],
        [delete(fake.DELOBJ, "o", 0, u32_attribute(3, 4))],
        [delete(fake.DELOBJ, "o", 0, u32_attribute(3, 1))],
    ],
    "a map of objects": [
        [
            *BASE,
            request(fake.NEWOBJ, NLM_F_CREATE, NAMED, text_attribute(2, "o"), u32_attribute(3, 1), nested(4)),
            container("m", 64, NLM_F_CREATE, 4, u32_attribute(15, 1)),
        ],
        [elements("m", Element(key(1), object="o"))],
        [elements("m", Element(key(2), object="p"))],
        [elements("m", Element(key(2)))],
        [delete(fake.DELOBJ, "o", 0, u32_attribute(3, 1))],
        [delete(fake.DELTABLE)],
    ],
    "many elements": [[*BASE, container("s")], [elements("s", *(Element(key(n)) for n in range(3000)))]],
}


def assert_alike(act: Callable[[Room], list[Any]]) -> None:
    """Assert that the fake does what the kernel does."""
    for number, (expected, found) in enumerate(zip(play(True, act), play(False, act), strict=True)):
        assert found == expected, f"step {number}"


@pytest.mark.parametrize("name", CASES)
def test_requests_are_answered_as_by_the_kernel(name: str) -> None:
    assert_alike(lambda room: [room.run(step) for step in CASES[name]])


def test_a_check_without_an_end_answers_and_changes_nothing() -> None:
    assert_alike(
        lambda room: [
            room.run(BASE, commit=False),
            room.run(BASE),
            room.run([rule("b", JUMPS), rule("x", JUMPS)], commit=False),
            room.run([chain("y"), chain("x", NLM_F_EXCL)], commit=False),
        ]
    )


def test_another_socket_cannot_change_an_owned_table() -> None:
    claims = [delete(fake.DELTABLE), chain("x"), table(2), table(), request(fake.DELTABLE, 0)]
    assert_alike(
        lambda room: [room.run([table(2)]), *(_without_ports(room.run([one], by="other")) for one in claims)]
    )


@pytest.mark.parametrize("flags", [2, 6])
def test_a_table_is_deleted_or_freed_with_its_owner(flags: int) -> None:
    def act(room: Room) -> list[Any]:
        with NetlinkSocket.open(NETLINK_NETFILTER) as owner:
            owner.transact(*transaction([table(flags), chain("x")]))
            seen = [_without_ports(room.seen())]
        return [*seen, room.seen(), room.run([table(flags)]), room.run([chain("y")], by="other")]

    assert_alike(lambda room: list(map(_without_ports, act(room))))


def _without_ports(answers: list[Answer]) -> list[Answer]:
    return [
        (*each[:5], {k: v for k, v in each[5].items() if k != 7}) if len(each) > 5 else each
        for each in answers
    ]


@pytest.mark.parametrize("generation", [0, 1, 2, 3])
def test_a_transaction_for_another_generation_is_refused(generation: int) -> None:
    begin = struct.pack(">BBH", 0, 0, 10) + u32_attribute(1, generation)

    def act(room: Room) -> list[Any]:
        room.run([table()])
        data = transaction([chain("x")])[0]
        room.writer._socket.send(message(16, 0, begin, 1) + data[20:])
        return [*read(room.writer), *room.seen()]

    assert_alike(act)


GETS: dict[str, tuple[int, bytes]] = {
    "table": (GETTABLE, NAMED),
    "no table": (GETTABLE, text_attribute(1, "z")),
    "nothing": (GETTABLE, b""),
    "chain": (GETCHAIN, NAMED + text_attribute(3, "b")),
    "no chain": (GETCHAIN, NAMED + text_attribute(3, "z")),
    "rule": (GETRULE, NAMED + text_attribute(2, "x") + attribute(3, struct.pack(">Q", 5))),
    "no rule": (GETRULE, NAMED + text_attribute(2, "x") + attribute(3, struct.pack(">Q", 99))),
    "rule without handle": (GETRULE, NAMED + text_attribute(2, "x")),
    "set": (GETSET, NAMED + text_attribute(2, "s")),
    "no set": (GETSET, NAMED + text_attribute(2, "z")),
    "element": (
        GETSETELEM,
        NAMED + text_attribute(2, "s") + element_list(encode_element(ONE), encode_element(TWO)),
    ),
    "no element": (
        GETSETELEM,
        NAMED + text_attribute(2, "s") + element_list(encode_element(ONE), encode_element(THREE)),
    ),
    "no catch-all": (GETSETELEM, NAMED + text_attribute(2, "s") + element_list(encode_element(Element(b"")))),
    "no elements asked for": (GETSETELEM, NAMED + text_attribute(2, "s")),
    "within an interval": (
        GETSETELEM,
        NAMED + text_attribute(2, "i") + element_list(encode_element(Element(key(12)))),
    ),
    "behind an interval": (
        GETSETELEM,
        NAMED + text_attribute(2, "i") + element_list(encode_element(Element(key(20)))),
    ),
    "start of an interval": (
        GETSETELEM,
        NAMED + text_attribute(2, "i") + element_list(encode_element(Element(key(10)))),
    ),
    "end of an interval": (
        GETSETELEM,
        NAMED + text_attribute(2, "i") + element_list(encode_element(Element(key(20), is_end=True))),
    ),
    "object": (GETOBJ, NAMED + text_attribute(2, "o") + u32_attribute(3, 1)),
    "object of another type": (GETOBJ, NAMED + text_attribute(2, "o") + u32_attribute(3, 2)),
    "object without type": (GETOBJ, NAMED + text_attribute(2, "o")),
    "generation": (fake.GETGEN, b""),
    "unknown": (0xA30, b""),
    "another subsystem": (0x6301, b""),
    "a change": (fake.NEWTABLE, NAMED),
}
HELD = [
    *BASE,
    rule("x", DROPS),
    rule("x", verdict(1)),
    container("s"),
    elements("s", ONE, TWO),
    container("i", 4),
    elements("i", *AN_INTERVAL),
    request(fake.NEWOBJ, NLM_F_CREATE, NAMED, text_attribute(2, "o"), u32_attribute(3, 1), nested(4)),
]


@pytest.mark.parametrize("flags", [0, NLM_F_ACK, NLM_F_DUMP])
@pytest.mark.parametrize("name", GETS)
def test_objects_are_read_as_from_the_kernel(name: str, flags: int) -> None:
    kind, body = GETS[name]

    def act(room: Room) -> list[Any]:
        room.run(HELD)
        return [room.ask(kind, flags, NFGENMSG.pack(family, 0, 0) + body) for family in (_IP, 10, 0)]

    assert_alike(act)


def test_a_listener_hears_all_but_the_ports_that_it_ignores() -> None:
    def act(room: Room) -> list[Any]:
        one = room.open(groups=[COMMITS_GROUP], ignore=[room.writer.port])
        both = room.open(groups=[COMMITS_GROUP], ignore=[room.writer.port, room.other.port])
        room.run(BASE)
        room.run([chain("y")], by="other")
        return [list(_joined(read(sock))) for sock in (one, both)]

    assert_alike(act)


def test_a_commit_during_a_dump_marks_it_as_interrupted() -> None:
    def act(room: Room) -> list[Any]:
        room.run([*BASE, container("s"), elements("s", *(Element(key(n)) for n in range(2500)))])
        found = []
        for commits in (False, True):
            of = NFGENMSG.pack(_IP, 0, 0) + NAMED + text_attribute(2, "s")
            room.writer._socket.send(message(GETSETELEM, NLM_F_DUMP, of, 7))
            first = room.writer.receive()
            assert first
            if commits:
                room.run([chain("y")], by="other")
            rest = [each for data in iter(room.writer.receive, b"") for each in netlink.messages(data)]
            found.append(any(flags & netlink.NLM_F_DUMP_INTR for _, flags, *_ in rest))
        return found

    assert_alike(act)


def test_a_second_dump_before_the_end_of_the_first_is_refused() -> None:
    def act(room: Room) -> list[Any]:
        room.run([*BASE, container("s"), elements("s", *(Element(key(n)) for n in range(2500)))])
        of = NFGENMSG.pack(_IP, 0, 0) + NAMED + text_attribute(2, "s")
        for sequence in (7, 8):
            room.writer._socket.send(message(GETSETELEM, NLM_F_DUMP, of, sequence))
        return [sorted({each[:2] for each in read(room.writer) if each[0] != NEWSETELEM})]

    assert_alike(act)


def test_a_message_longer_than_the_buffer_is_refused() -> None:
    def act(room: Room) -> list[Any]:
        with pytest.raises(OSError, match="too long"):
            room.writer._socket.send(bytes(room.writer.send_limit * 2))
        return [room.run(BASE)]

    assert_alike(act)


def test_a_listener_that_does_not_read_loses_notifications_and_is_told_once() -> None:
    def act(room: Room) -> list[Any]:
        listener = room.open(groups=[COMMITS_GROUP])
        room.run([*BASE, container("s"), elements("s", *(Element(key(n)) for n in range(3000)))])
        for _ in range(3):
            room.run([delete(DELSETELEM, "s")])
            room.run([elements("s", *(Element(key(n)) for n in range(3000)))])
        found = [listener.pending()[1]]
        room.run([chain("y")])
        return [*found, listener.pending()[1]]

    assert_alike(act)


def test_faults_meet_the_requests_they_are_meant_for() -> None:
    with FakeKernel() as kernel, NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        kernel.refuse(errno.ENOMEM, kind=fake.NEWCHAIN, after=1, times=2)
        refused = sock.transact(*transaction([table(), *map(chain, "abcd")]))
        assert refused == [(4, errno.ENOMEM), (5, errno.ENOMEM)]
        assert sock.transact(*transaction([table(), *map(chain, "abcd")])) == []
        kernel.lose_answers(kind=GETTABLE, after=1)
        assert sock.request(GETCHAIN, 0, NFGENMSG.pack(_IP, 0, 0) + NAMED + text_attribute(3, "a"))
        with pytest.raises(OSError, match="No buffer space"):
            sock.request(GETTABLE, 0, NFGENMSG.pack(_IP, 0, 0) + NAMED)
        assert sock.request_one(GETTABLE, NFGENMSG.pack(_IP, 0, 0) + NAMED)


# Transactions of any requests over few names.

names = st.sampled_from(["x", "y", "b"])
sets = st.sampled_from(["s", "i", "v"])
numbers = st.integers(1, 6).map(key)
hows = st.sampled_from([NLM_F_CREATE, NLM_F_CREATE, NLM_F_CREATE | NLM_F_EXCL, 0])
verdicts = st.one_of(
    st.just(Verdict(0)),
    st.builds(Verdict, st.just(NFT_JUMP), names),
    st.just(Verdict(1)),
    st.just(Verdict(-5)),
)
KINDS = {
    "s": container("s", 0, NLM_F_CREATE, 4, nested(9, u32_attribute(1, 3))),
    "i": container("i", 4),
    "v": container("v", 8, NLM_F_CREATE, 4, VERDICTS),
}


@st.composite
def some_elements(draw: st.DrawFn) -> NetlinkRequest:
    name = draw(sets)
    kind = draw(st.sampled_from([NEWSETELEM, NEWSETELEM, DELSETELEM]))
    if name == "i":
        first, last = sorted(draw(st.lists(st.integers(1, 9), min_size=2, max_size=2, unique=True)))
        given = [Element(key(first)), Element(key(last), is_end=True)]
    else:
        data = draw(verdicts) if name == "v" and kind == NEWSETELEM else None
        given = [Element(each, data) for each in draw(st.lists(numbers, min_size=1, max_size=2))]
    return elements(name, *given, kind=kind, how=draw(hows) if kind == NEWSETELEM else 0)


requests = st.one_of(
    st.builds(table, st.sampled_from([0, 0, 0, 1]), hows),
    st.sampled_from([delete(fake.DELTABLE), delete(fake.DELTABLE, "", _NONREC)]),
    st.builds(chain, names.filter(lambda name: name != "b"), hows),
    st.builds(
        lambda how, at: chain("b", how, at), hows, st.sampled_from([hook(1), hook(1), hook(4, 100, "nat")])
    ),
    st.builds(delete, st.just(fake.DELCHAIN), names, st.sampled_from([0, 0, _NONREC])),
    st.builds(
        lambda of, what, how: rule(of, what, how=how),
        names,
        st.one_of(
            verdicts.map(lambda each: verdict(each.code, each.chain)),
            sets.map(lookup),
            st.just(lookup("v", verdicts=True)),
            st.just(expression("masq")),
            st.just(expression("counter")),
        ),
        st.sampled_from([NLM_F_CREATE | _APPEND, NLM_F_CREATE]),
    ),
    st.builds(delete, st.just(fake.DELRULE), names),
    sets.map(KINDS.__getitem__),
    st.builds(delete, st.just(fake.DELSET), sets),
    st.builds(delete, st.just(DELSETELEM), sets),
    some_elements(),
    some_elements(),
    some_elements(),
)
transactions = st.lists(st.lists(requests, min_size=1, max_size=4), min_size=1, max_size=12)


@settings(suppress_health_check=list(HealthCheck))
@given(transactions)
def test_any_transactions_end_as_in_the_kernel(steps: list[list[NetlinkRequest]]) -> None:
    begin = [*BASE, *KINDS.values()]
    assert_alike(lambda room: [room.run(begin), *map(room.run, steps)])

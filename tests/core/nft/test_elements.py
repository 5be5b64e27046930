"""The codec of elements: what is written is read again, by this module and by the kernel."""

import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kproxy_core.model.address import Address, Cidr, Family
from kproxy_core.netlink.messages import Malformed, Span, TooLong, attribute, fitting, text_attribute
from kproxy_core.nft.elements import (
    CATCH_ALL,
    Data,
    Element,
    Found,
    by_key,
    element_list,
    elements_of,
    encode_element,
    parse_elements,
    parse_packets,
    parse_plain,
    plain_lists,
)
from kproxy_core.nft.messages import commands_text
from kproxy_core.nft.objects import Chain, Container, Object, Table
from kproxy_core.nft.rules import (
    ADDRESS,
    MARK,
    NF_ACCEPT,
    NF_DROP,
    NFT_GOTO,
    NFT_JUMP,
    NFT_RETURN,
    PORT,
    PROTOCOL,
    VERDICT,
    Verdict,
    limit,
)
from kproxy_core.nft.transaction import RulesetSocket

LONGEST = 0xFFFF


def span(lists: Sequence[bytes]) -> Span:
    data = b"".join(lists)
    return data, 0, len(data)


def counter(packets: int, size: int = 0) -> bytes:
    numbers = attribute(1, struct.pack(">Q", size)) + attribute(2, struct.pack(">Q", packets))
    return text_attribute(1, "counter") + attribute(2, numbers)


# Without a kernel.

(_EXPRESSION,) = limit(1).expressions
LIMIT = text_attribute(1, "limit") + attribute(2, b"".join(
    attribute(kind, value) for kind, value in [*_EXPRESSION.attributes.items(), (5, bytes(4))]))
"""As the kernel lists it: with all attributes, and without NLA_F_NESTED."""
verdicts = st.builds(Verdict, st.integers(-2**31, 4), st.sampled_from(["", "c", "services", "c" * 60]))
data = st.none() | st.binary(max_size=20) | verdicts
counters = st.builds(counter, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
keys = st.sampled_from([4, 8, 13]).flatmap(lambda size: st.binary(min_size=size, max_size=size))
elements = st.builds(
    Element, st.just(b"") | keys, data, st.just(b"") | keys, st.booleans(),
    st.sampled_from([0, 1, 3_600_000, 2**64 - 1]),
    st.lists(counters | st.just(LIMIT), max_size=2).map(tuple), st.sampled_from(["", "object"]))
lists = st.lists(elements, min_size=1, max_size=8)
plain = st.tuples(keys, data)


@given(lists)
def test_elements_of_all_kinds_are_read_as_they_are_written(written: list[Element]) -> None:
    assert [*parse_elements(span([element_list(*map(encode_element, written))]))] == written


def as_found(element: Element) -> Found:
    key, found, last, is_end, _, expressions, object_ = element
    return element if not key or last or is_end or expressions or object_ else found


@given(lists)
def test_plain_elements_are_read_as_all_others_are(written: list[Element]) -> None:
    read = [*parse_plain(span([element_list(*map(encode_element, written))]))]
    assert read == [(element.key, as_found(element)) for element in written]


@given(st.lists(plain, min_size=1, max_size=300))
def test_plain_elements_are_written_as_all_others_are(written: list[tuple[bytes, Data]]) -> None:
    encoded = [encode_element(Element(*each)) for each in written]
    assert [*plain_lists(*zip(*written, strict=True))] == [
        element_list(*encoded[part]) for part in fitting(encoded)]


sizes = st.integers(1, 20)
alike = st.tuples(sizes, sizes | st.just(None), sizes).flatmap(lambda size: st.lists(st.tuples(
    st.binary(min_size=size[0], max_size=size[0]),
    st.none() if size[1] is None else st.binary(min_size=size[1], max_size=size[1])),
    min_size=size[2], max_size=20))
"""Keys and data as in most maps and sets: all of one size."""


@given(alike)
def test_elements_that_are_alike_are_read_as_they_are_written(written: list[tuple[bytes, Data]]) -> None:
    listed = span([*plain_lists(*zip(*written, strict=True))])
    assert [*parse_plain(listed)] == written
    assert [*parse_elements(listed)] == [Element(*each) for each in written]


@given(st.lists(st.tuples(st.binary(min_size=8, max_size=8), counters), min_size=1, max_size=20),
       st.sampled_from([0, 5000]))
def test_counts_are_read_as_they_are_written(found: list[tuple[bytes, bytes]], timeout: int) -> None:
    written = [Element(key, timeout=timeout, expressions=(one,)) for key, one in found]
    listed = span([element_list(*map(encode_element, written))])
    assert [*parse_packets(listed)] == [(each.key, each.packets) for each in written]


edits = st.lists(st.tuples(st.integers(0, 4000), st.binary(max_size=4)), min_size=1, max_size=3)
"""Bytes that are written somewhere; b"": the message ends there."""


@given(st.one_of(lists, alike.map(lambda found: [Element(*each) for each in found])), edits)
def test_changed_messages_are_malformed_or_read_alike(
    written: list[Element], changes: list[tuple[int, bytes]]
) -> None:
    changed = element_list(*map(encode_element, written))
    for place, value in changes:
        at = place % (len(changed) or 1)
        changed = changed[:at] + value + changed[at + len(value):] if value else changed[:at]
    for parse in (parse_elements, parse_plain, parse_packets):
        read: list[object] | None = None
        try:
            read = [*parse(span([changed]))]
            one_by_one = [*parse(span([*map(element_list, split(changed))]))]
        except Malformed:
            continue
        assert read == one_by_one


def split(listed: bytes) -> Iterator[bytes]:
    """Yield the elements of a list, of which a reader cannot say that they are alike."""
    size = struct.unpack_from("=H", listed)[0] if len(listed) >= 4 else 0
    at = 4
    while at + 4 <= min(size, len(listed)):
        length = struct.unpack_from("=H", listed, at)[0]
        if length < 4:
            return
        yield listed[at : at + length]
        at += length + 3 & ~3


@given(lists, st.integers(1, 100))
def test_cut_messages_are_malformed(written: list[Element], less: int) -> None:
    whole = element_list(*map(encode_element, written))
    cut = whole[: max(1, len(whole) - less)]
    for parse in (parse_elements, parse_plain, parse_packets):
        if len(cut) >= 4:
            with pytest.raises(Malformed):
                list(parse((cut, 0, len(cut))))
            with pytest.raises(Malformed):
                list(parse((cut, 0, len(whole))))


def test_a_list_holds_65_535_bytes() -> None:
    """The length of an attribute has 16 bits, and includes its header of 4 bytes."""
    around = len(element_list(encode_element(Element(b"key1", b"abcd")))) - 4
    most = (LONGEST - around) // 4 * 4
    element = Element(b"key1", bytes(most))
    listed = element_list(encode_element(element))
    assert LONGEST - 3 <= len(listed) <= LONGEST
    assert [*parse_elements(span([listed]))] == [element]
    (one,) = plain_lists([element.key], [element.data])
    assert one == listed
    for more in (Element(b"key1", bytes(most + 1)), Element(b"key1", Verdict(NFT_GOTO, "c" * LONGEST))):
        with pytest.raises(TooLong):
            element_list(encode_element(more))
        with pytest.raises(TooLong):
            list(plain_lists([more.key], [more.data]))


@pytest.mark.parametrize("value", [b"datadata", None, Verdict(NFT_GOTO, "services")])
@pytest.mark.parametrize("more", [0, 1])
def test_one_more_than_a_list_holds_takes_another_list(value: Data, more: int) -> None:
    most = (LONGEST - 4) // len(encode_element(Element(bytes(4), value)))
    written = [(number.to_bytes(4, "big"), value) for number in range(most + more)]
    made = [*plain_lists(*zip(*written, strict=True))]
    assert len(made) == 1 + more
    assert [*parse_plain(span(made))] == written


def test_elements_that_are_missing_in_a_dump_are_noticed() -> None:
    """The kernel sends one twice for each that it skips while it resizes a hash table."""
    head = bytes(4)
    counted = [Element(bytes([key]) * 4, expressions=(counter(key),)) for key in range(3)]
    seen_later = counted[0]._replace(expressions=(counter(9),))
    for parse in (parse_plain, parse_packets):
        for last, is_missing in ((counted[2], False), (seen_later, True)):
            listed = [head + element_list(*map(encode_element, part)) for part in (counted[:2], [last])]
            answers = [(each, 0, len(each)) for each in listed]
            if is_missing:
                with pytest.raises(InterruptedError):
                    by_key(parse, answers)
            else:
                assert len(by_key(parse, answers)) == 3


# In the kernel.


class Kind(NamedTuple):
    """A kind of container, and lists of elements for it."""

    container: Callable[[Family], Container]
    elements: Callable[[Family], st.SearchStrategy[list[Element]]]
    by_nft: bool = True
    """nft can add the elements, too."""


def numbers(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 256**min(size, 4) - 2), min_size=1, max_size=12, unique=True)


def addresses(family: Family) -> st.SearchStrategy[list[Address]]:
    return numbers(4).map(lambda found: [Address(number.to_bytes(family.size, "big")) for number in found])


def keyed(
    family: Family, behind: bytes, value: st.SearchStrategy[Data], **more: st.SearchStrategy[object]
) -> st.SearchStrategy[list[Element]]:
    """Return elements whose keys are addresses with something *behind* them."""
    none = {"last": st.just(b""), "is_end": st.just(False), "timeout": st.just(0),
            "expressions": st.just(()), "object": st.just("")}  # fmt: skip
    return addresses(family).flatmap(lambda found: st.tuples(*(
        st.builds(Element, st.just(address + behind), value, **{**none, **more}) for address in found
    )).map(list))


def networks(family: Family) -> st.SearchStrategy[list[Cidr]]:
    """Return networks that do not overlap, some of them neighbours."""
    prefix = family.bits - 4
    return st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True).map(lambda found: [
        Cidr(Address((number << 4).to_bytes(family.size, "big")), prefix) for number in sorted(found)])


def ranges(family: Family) -> st.SearchStrategy[list[Element]]:
    """Return concatenations of a network and a range of ports, which do not overlap."""
    def made(found: list[tuple[Cidr, int, int, bytes]]) -> list[Element]:
        return [
            Element(
                network.network + struct.pack(">BxxxHxx", 6, port),
                value,
                (int.from_bytes(network.network, "big") | 15).to_bytes(family.size, "big")
                + struct.pack(">BxxxHxx", 6, port + more))
            for network, port, more, value in found
        ]  # fmt: skip

    each = st.tuples(st.integers(1, 60_000), st.integers(0, 5000), st.binary(min_size=2, max_size=2))
    return networks(family).flatmap(lambda nets: st.tuples(*(
        each.map(lambda found, net=net: (net, *found)) for net in nets)).map(list)).map(made)  # type: ignore[misc]


PORT_80 = b"\x06\0\0\0\0\x50\0\0"
verdicts_in_use = st.sampled_from([
    Verdict(NF_DROP), Verdict(NF_ACCEPT), Verdict(NFT_RETURN), Verdict(NFT_GOTO, "c"),
    Verdict(NFT_JUMP, "c"),
])
timeouts = st.sampled_from([0, 4000, 3_600_000])
counted = st.builds(counter, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)).map(lambda one: (one,))

KINDS = {
    "set": Kind(
        lambda family: Container("s", (ADDRESS[family], PROTOCOL, PORT)),
        lambda family: keyed(family, PORT_80, st.none())),
    "set of short keys": Kind(
        lambda family: Container("s", (PORT,)),
        lambda family: numbers(2).map(lambda found: [Element(n.to_bytes(2, "big")) for n in found])),
    "map of ports": Kind(
        lambda family: Container("s", (ADDRESS[family],), (PORT,)),
        lambda family: keyed(family, b"", st.binary(min_size=2, max_size=2))),
    "map of marks": Kind(
        lambda family: Container("s", (PROTOCOL,), (MARK,)),
        lambda family: numbers(1).map(lambda found: [
            Element(bytes([n]), bytes([0, n, 0, 1])) for n in found])),
    "map of sockets": Kind(
        lambda family: Container("s", (ADDRESS[family], PORT), (ADDRESS[family], PORT)),
        lambda family: keyed(family, b"\0\x50\0\0", st.binary(min_size=2, max_size=2).map(
            lambda port: bytes(family.size) + port + b"\0\0"))),
    "map of verdicts": Kind(
        lambda family: Container("s", (ADDRESS[family], PROTOCOL, PORT), (VERDICT,)),
        lambda family: keyed(family, PORT_80, verdicts_in_use)),
    "set of networks": Kind(
        lambda family: Container("s", (ADDRESS[family],), interval=True),
        lambda family: networks(family).map(lambda found: [
            each for one in found for each in elements_of(one)]), by_nft=False),
    "map of networks": Kind(
        lambda family: Container("s", (ADDRESS[family],), (VERDICT,), interval=True),
        lambda family: networks(family).map(lambda found: [
            each if each.is_end else each._replace(data=Verdict(NFT_GOTO, "c"))
            for one in found for each in elements_of(one)]), by_nft=False),
    "map of concatenated intervals": Kind(
        lambda family: Container("s", (ADDRESS[family], PROTOCOL, PORT), (PORT,), interval=True), ranges),
    "set that rules fill": Kind(
        lambda family: Container("s", (ADDRESS[family], PROTOCOL, PORT), dynamic=True, timeout=600, size=100),
        lambda family: keyed(family, PORT_80, st.none(), timeout=timeouts)),
    "map that rules fill": Kind(
        lambda family: Container("s", (ADDRESS[family],), (ADDRESS[family],), dynamic=True, size=100),
        lambda family: keyed(family, b"", st.just(bytes(family.size)), timeout=timeouts)),
    "set with counters": Kind(
        lambda family: Container("s", (ADDRESS[family], PROTOCOL, PORT), dynamic=True, timeout=600, size=100),
        lambda family: keyed(family, PORT_80, st.none(), timeout=timeouts, expressions=counted),
        by_nft=False),
    "set with limits and counters": Kind(
        lambda family: Container("s", (ADDRESS[family],)),
        lambda family: keyed(family, b"", st.none(), expressions=st.just((counter(1, 2), LIMIT))),
        by_nft=False),
    "catch-all of a set": Kind(
        lambda family: Container("s", (ADDRESS[family],)),
        lambda family: keyed(family, b"", st.none()).map(lambda found: [*found, CATCH_ALL])),
    "catch-all of a map": Kind(
        lambda family: Container("s", (ADDRESS[family],), (VERDICT,)),
        lambda family: keyed(family, b"", verdicts_in_use).flatmap(lambda found: verdicts_in_use.map(
            lambda verdict: [*found, CATCH_ALL._replace(data=verdict)]))),
    "catch-all of networks": Kind(
        lambda family: Container("s", (ADDRESS[family],), interval=True),
        lambda family: networks(family).map(lambda found: [
            *(each for one in found for each in elements_of(one)), CATCH_ALL]), by_nft=False),
}  # fmt: skip


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_kernel_lists_what_is_written(netns: None, kind: Kind, family: Family) -> None:
    table, container = Table(family, "t"), kind.container(family)
    objects: list[Object] = [Chain("c"), container]

    @settings(max_examples=12, suppress_health_check=list(HealthCheck))
    @given(kind.elements(family))
    def check(written: list[Element]) -> None:
        wanted = frozenset(written)
        keys = {each.key: as_found(each) for each in written if each.key}
        with RulesetSocket.open() as connection:
            connection.run([*table.replace(objects), *table.add_elements(container, written)])
            assert connection.elements(family, "t", "s") == wanted
            if not container.interval:
                for key, found in keys.items():
                    assert connection.element(family, "t", "s", key) == found
            if not any(each.is_end for each in written):
                assert connection.plain_elements(family, "t", "s") == keys
                assert connection.packets(family, "t", "s") == {
                    each.key: each.packets for each in written if each.key}
                connection.run([*table.change_elements(container, written, written[:1])])
                assert connection.elements(family, "t", "s") == frozenset(written[:1])
            if kind.by_nft:
                text = commands_text([*table.replace(objects), *table.add_elements(container, written)])
                subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)
                assert connection.elements(family, "t", "s") == wanted

    check()


def test_names_of_objects_are_read(netns: None) -> None:
    subprocess.run([
        "nft", "add table ip t; add counter ip t one; add map ip t s { type mark : counter; }; "
               'add element ip t s { 7 : "one" }'], check=True)
    with RulesetSocket.open() as connection:
        (found,) = connection.elements(Family.IPV4, "t", "s")
        assert found == Element(struct.pack("=I", 7), object="one")
        assert connection.plain_elements(Family.IPV4, "t", "s") == {found.key: found}

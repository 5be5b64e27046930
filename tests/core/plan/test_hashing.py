"""The table of consistent hashing, and the hash that selects one of its slots."""

from collections import Counter

import pytest

from kproxy_conformance.builders import addresses, destinations, endpoint_slice, node_view, plans, service
from kproxy_core.model.service import Destination
from kproxy_core.plan.hashing import SIZES, hash_slots, jhash, populate, slot_of

TEN = destinations(" ".join(f"10.1.{n}.{n + 10}:8080" for n in range(10)))
FLOWS = [(addresses(f"10.2.{n >> 8 & 255}.{n & 255}")[0], 1024 + n * 7919 % 60000) for n in range(10_000)]


def test_the_example_of_the_paper() -> None:
    """Table 1: three backends with their offsets and skips, and the same without the second one."""
    b0, b1, b2 = (3, 4), (0, 2), (3, 1)
    assert populate([b0, b1, b2], [1, 1, 1], 7) == [1, 0, 1, 0, 2, 2, 0]
    assert populate([b0, b2], [1, 1], 7) == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("key", "seed", "value"), [
    (b"", 0, 0xDEADBEEF),
    (b"", 0xDEADBEEF, 0xBD5B7DDE),
    (b"Four score and seven years ago", 0, 0x17770551),
    (b"Four score and seven years ago", 1, 0xCD628161),
])
def test_the_hash(key: bytes, seed: int, value: int) -> None:
    """Those that Bob Jenkins' lookup3.c prints (driver5), from which linux/jhash.h comes."""
    assert jhash(key, seed) == value


@pytest.mark.parametrize("by_port", [False, True])
def test_two_nodes_choose_alike(by_port: bool) -> None:
    """They learn of the endpoints in different slices and orders; each endpoint gets its share of flows."""
    made = []
    for node, order in ("node1", 1), ("node2", -1):
        slices = [endpoint_slice("web", *(where_text(where) for where in part[::order]), name=f"web-{number}")
                  for number, part in enumerate([TEN[:3], TEN[3:]][::order])]
        web = service("web", hash_by="flow" if by_port else "client")
        (plan,) = plans(node_view(node), web, *slices).values()
        made.append(chosen(plan.cluster_slots, by_port=by_port))
    assert made[0] == made[1]
    assert all(900 < number < 1100 for number in Counter(made[0]).values())


def where_text(where: Destination) -> str:
    return ".".join(map(str, where.address))


def chosen(slots: tuple[Destination, ...], *, by_port: bool) -> list[Destination]:
    return [slots[slot_of(client, port if by_port else None, len(slots))] for client, port in FLOWS]


@pytest.mark.parametrize("gone", range(10))
def test_few_flows_of_others_move_when_one_of_ten_endpoints_goes(gone: int) -> None:
    before = chosen(hash_slots(TEN, ()), by_port=True)
    after = chosen(hash_slots(TEN[:gone] + TEN[gone + 1:], ()), by_port=True)
    others = [(was, now) for was, now in zip(before, after, strict=True) if was != TEN[gone]]
    moved = sum(was != now for was, now in others)
    assert moved < 0.15 * len(others)
    assert TEN[gone] not in after


def test_shares_follow_weights() -> None:
    slots = Counter(hash_slots(TEN[:3], (3, 2, 1)))
    assert [round(slots[where] / sum(slots.values()), 2) for where in TEN[:3]] == [0.5, 0.33, 0.17]


@pytest.mark.parametrize(("endpoints", "size"), [(0, 0), (1, 1), (2, 1021), (1021, 1021), (1022, 16381)])
def test_the_size_of_the_table(endpoints: int, size: int) -> None:
    all_of_them = destinations(" ".join(f"10.{n >> 8}.{n & 255}.1:80" for n in range(endpoints)))
    slots = hash_slots(all_of_them, ())
    assert len(slots) == size
    assert set(slots) == set(all_of_them)


def test_sizes_are_prime() -> None:
    """Else an endpoint could not prefer every slot, and the table would never be full."""
    assert all(all(size % n for n in range(2, int(size ** 0.5) + 1)) for size in SIZES)

"""Consistent hashing: every node sends the same client, or the same flow, to the same endpoint.

A hash of the client selects a slot of a table that depends only on the endpoints. When these change, most
slots keep their endpoint. Sources: Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load
Balancer" (NSDI 2016), section 3.4; linux/jhash.h; net/netfilter/nft_hash.c.
"""

import struct
import sys
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

from kproxy_core.model.address import Address
from kproxy_core.model.service import Destination

HashBy = Literal["", "client", "flow"]

HASH_SEED = 0x6B70726F
"""The seed of the hash, the same in the whole cluster, and in every release."""

SIZES = (1021, 16381, 131071)
"""Sizes of tables: primes. The smallest that has a slot for each endpoint is used, if it may be used."""

_WORDS = struct.Struct("=3I")


def count_hash_slots(endpoints: int) -> int:
    """Return the size of the table for so many *endpoints*."""
    return endpoints if endpoints < 2 else next(size for size in SIZES if size >= endpoints)


@lru_cache(maxsize=64)
def hash_slots(endpoints: tuple[Destination, ...], weights: tuple[int, ...]) -> tuple[Destination, ...]:
    """Return the table of *endpoints*, which are in order. *weights* (): all are equal.

    Cached, because both the difference of two plans and the explanation of a packet need it.
    """
    if len(endpoints) < 2:
        return endpoints
    size = count_hash_slots(len(endpoints))
    preferences = [_preference(where, size) for where in endpoints]
    table = populate(preferences, weights or (1,) * len(endpoints), size)
    return tuple([endpoints[at] for at in table])


def populate(preferences: Sequence[tuple[int, int]], weights: Sequence[int], size: int) -> list[int]:
    """Return the number of the endpoint in each of *size* slots.

    *preferences* are the first slot that each endpoint prefers and the distance to the next one. The
    endpoints take turns; one with a lower weight than others misses some.
    """
    table = [-1] * size
    heaviest = max(weights)
    due = list(weights)
    following = [first for first, _ in preferences]
    left = size
    while True:
        for at, (_, skip) in enumerate(preferences):
            if due[at] < heaviest:
                due[at] += weights[at]
                continue
            due[at] += weights[at] - heaviest
            slot = following[at]
            while table[slot] >= 0:
                slot = (slot + skip) % size
            table[slot] = at
            following[at] = (slot + skip) % size
            left -= 1
            if not left:
                return table


def _preference(where: Destination, size: int) -> tuple[int, int]:
    digest = blake2b(where.address + where.port.to_bytes(2, "big"), digest_size=16).digest()
    first, skip = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
    return first % size, skip % (size - 1) + 1


def slot_of(client: Address, port: int | None, size: int) -> int:
    """Return the slot, of *size*, of connections from an address and *port*; None: from any port.

    As the kernel's ``jhash ip saddr . tcp sport mod SIZE`` on a machine of the same byte order.
    """
    key = bytes(client) if port is None else client + port.to_bytes(2, "big") + bytes(2)
    return jhash(key, HASH_SEED) * size >> 32


def jhash(key: bytes, seed: int) -> int:
    """Return the kernel's hash of *key*, whole words of 4 bytes."""
    a = b = c = (0xDEADBEEF + len(key) + seed) & 0xFFFFFFFF
    at = 0
    while len(key) - at > 12:
        x, y, z = _WORDS.unpack_from(key, at)
        a, b, c = _mix(a + x, b + y, c + z)
        at += 12
    rest = [int.from_bytes(key[i:i + 4], sys.byteorder) for i in range(at, len(key), 4)]
    if not rest:
        return c
    x, y, z = [*rest, 0, 0][:3]
    return _final(a + x, b + y, c + z)


def _rotated(word: int, shift: int) -> int:
    word &= 0xFFFFFFFF
    return word << shift & 0xFFFFFFFF | word >> 32 - shift


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    a = a - c ^ _rotated(c, 4)
    c += b
    b = b - a ^ _rotated(a, 6)
    a += c
    c = c - b ^ _rotated(b, 8)
    b += a
    a = a - c ^ _rotated(c, 16)
    c += b
    b = b - a ^ _rotated(a, 19)
    a += c
    c = c - b ^ _rotated(b, 4)
    b += a
    return a & 0xFFFFFFFF, b & 0xFFFFFFFF, c & 0xFFFFFFFF


def _final(a: int, b: int, c: int) -> int:
    c = (c ^ b) - _rotated(b, 14)
    a = (a ^ c) - _rotated(c, 11)
    b = (b ^ a) - _rotated(a, 25)
    c = (c ^ b) - _rotated(b, 16)
    a = (a ^ c) - _rotated(c, 4)
    b = (b ^ a) - _rotated(a, 14)
    c = (c ^ b) - _rotated(b, 24)
    return c & 0xFFFFFFFF

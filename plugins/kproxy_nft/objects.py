"""Tables, chains, rules, maps, sets and flowtables, as nf_tables lists them, and their digest. Pure.

Layouts: linux/netfilter/nf_tables.h.
"""

import hashlib
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from kproxy_core.host.netlink.messages import Span, attributes, text
from kproxy_core.host.netlink.nf_tables import GETCHAIN, GETFLOWTABLE, GETRULE, GETSET, GETTABLE, TABLE_NAME

_LAYOUTS: Final = {
    # attribute with the name of the object, or of a rule's chain, and those with the content
    GETTABLE: (TABLE_NAME, (2, 6)),  # flags, comment
    GETCHAIN: (3, (4, 5, 7, 10, 12)),  # hook, policy, type, flags, comment
    GETRULE: (2, (4, 5, 7)),  # expressions, compat, comment
    GETSET: (2, (3, 4, 5, 6, 7, 9, 11, 17, 18)),  # flags, types, size, timeout, expressions
    GETFLOWTABLE: (2, (3, 7)),  # hook and devices, flags
}
KINDS: Final = tuple(_LAYOUTS)


class Object(NamedTuple):
    """A table, chain, rule, map, set or flowtable."""

    kind: int
    name: str
    content: bytes


def parse_objects(kind: int, spans: Iterable[Span], table: str, wanted: Collection[str]) -> list[Object]:
    """Return the objects of *table* that are named in *wanted*, anonymous sets, and the table itself."""
    named, parts = _LAYOUTS[kind]
    found = []
    for span in spans:
        values = attributes(*span)
        name = text(values[named])
        if text(values[TABLE_NAME]) == table and (name in wanted or is_anonymous(name) or kind == GETTABLE):
            content = b"".join(
                b"%d:%d:%b" % (part, len(values[part]), values[part]) for part in parts if part in values
            )
            found.append(Object(kind, name, content))
    return found


def is_anonymous(name: str) -> bool:
    """Return True for the kernel's name of a set that is written inside of a rule."""
    return name.startswith("__")


def fingerprint(objects: Iterable[Object]) -> bytes:
    """Return a digest of *objects*. The order of rules in one chain matters, any other does not.

    Rules are never compared as text: each release of nft prints them in its own way. Handles, use counts and
    counters change by themselves and are left out.
    """
    digest = hashlib.blake2b(digest_size=16)
    for item in sorted(objects, key=lambda item: item[:2]):
        digest.update(b"%d %b %d:%b" % (item.kind, item.name.encode(), len(item.content), item.content))
    return digest.digest()

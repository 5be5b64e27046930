"""Filter chains of other programs, read over netlink; see `kproxy_core.linux.nft_filters`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from kproxy_core.linux import messages
from kproxy_core.linux.messages import (
    GETCHAIN,
    GETRULE,
    GETSET,
    NFGENMSG,
    Span,
    attributes,
    text,
    text_attribute,
)
from kproxy_core.linux.netlink import NetlinkSocket
from kproxy_core.linux.nft_filters import (
    BaseChain,
    HeldSet,
    parse_base_chain,
    parse_held_set,
    parse_set_elements,
)
from kproxy_core.linux.nft_tables import HeldRule, parse_rule
from kproxy_core.linux.nftables import ABSENT

T = TypeVar("T")

_GETSETELEM: Final = messages.KIND | 13
_FAMILY_NUMBERS: Final = {name: number for number, name in messages.FAMILIES.items()}


class ListedFilters:
    """The chains, rules and sets of this thread's network namespace, each read when it is first asked for.

    All methods raise OSError.
    """

    def __init__(self, sock: NetlinkSocket) -> None:
        self._socket = sock
        self._chains: Sequence[tuple[str, str, str, BaseChain | None]] | None = None
        self._rules: dict[tuple[str, str, str], Sequence[HeldRule]] = {}
        self._sets: dict[tuple[str, str, str], HeldSet | None] = {}

    def base_chains(self) -> Sequence[BaseChain]:
        return [base for *_, base in self._listed_chains() if base is not None]

    def chain_names(self, family: str, table: str) -> frozenset[str]:
        return frozenset(name for *of, name, _ in self._listed_chains() if of == [family, table])

    def _listed_chains(self) -> Sequence[tuple[str, str, str, BaseChain | None]]:
        if self._chains is None:
            self._chains = self._dumped(GETCHAIN, 0, b"", _chain)
        return self._chains

    def rules(self, family: str, table: str, chain: str) -> Sequence[HeldRule]:
        key = family, table, chain
        if key not in self._rules:
            of = text_attribute(1, table) + text_attribute(2, chain)
            self._rules[key] = self._dumped(
                GETRULE, _FAMILY_NUMBERS[family], of, lambda _, span: [parse_rule(span)[1]])
        return self._rules[key]

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None:
        key = family, table, name
        if key not in self._sets:
            self._sets[key] = self._held_set(
                _FAMILY_NUMBERS[family], text_attribute(1, table) + text_attribute(2, name))
        return self._sets[key]

    def _held_set(self, family: int, of: bytes) -> HeldSet | None:
        try:
            ((data, start, end),) = self._socket.request(GETSET, 0, NFGENMSG.pack(family, 0, 0) + of)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise
        elements = self._dumped(_GETSETELEM, family, of, lambda _, span: [*parse_set_elements(*span)])
        return parse_held_set(attributes(data, start + NFGENMSG.size, end), elements)

    def _dumped(
        self, kind: int, family: int, of: bytes, parse: Callable[[str, Span], Iterable[T]]
    ) -> list[T]:
        """Return what *parse* makes of family and attributes of each answer; none without a subject."""

        def collect(answers: Iterator[Span]) -> list[T]:
            return [
                item for data, start, end in answers
                for item in parse(messages.FAMILIES.get(data[start], "?"), (data, start + NFGENMSG.size, end))
            ]  # fmt: skip

        try:
            return self._socket.dump(kind, NFGENMSG.pack(family, 0, 0) + of, collect)
        except OSError as error:
            if error.errno in ABSENT:
                return []
            raise


def _chain(family: str, span: Span) -> Iterator[tuple[str, str, str, BaseChain | None]]:
    """Yield family, table and name of a listed chain, and what it is at a hook."""
    found = attributes(*span)
    yield family, text(found[1]), text(found[3]), parse_base_chain(family, found)

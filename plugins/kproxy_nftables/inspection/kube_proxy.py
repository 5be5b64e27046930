"""kube-proxy's table as nft prints it. Pure. Source: docs/behaviour/nftables.md."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from kproxy_core.model.address import Protocol, parse_address
from kproxy_nftables.inspection.walk import Table
from kproxy_nftables.wanted import Value, port_key

TABLE = "kube-proxy"

VIPS = ("service-ips", "no-endpoint-services")
NODE_PORTS = ("service-nodeports", "no-endpoint-nodeports")
_CONTAINER = re.compile(r"^\t(?:set|map) (\S+) \{.*?$(.*?)^\t\}$", re.DOTALL | re.MULTILINE)
_ELEMENTS = re.compile(r"elements = \{(.*)\}", re.DOTALL)
_ASIDE = re.compile(r' (?:comment "[^"]*"|(?:timeout|expires) \S+|counter packets \d+ bytes \d+)')


class KubeProxyTable(Table):
    """The table of one IP family. It has no set of the ClusterIPs' networks: the rules name them."""

    def __init__(self, rules: Mapping[str, Sequence[str]], text: str) -> None:
        """*rules* are those of each chain in *text*."""
        super().__init__(rules)
        self._elements = {name: dict(_elements(body)) for name, body in _CONTAINER.findall(text)}

    def find(self, container: str, key: bytes) -> Value:
        return self._elements[container][key]

    def keys(self, containers: Sequence[str]) -> Iterator[bytes]:
        """Yield the keys of those *containers* that exist."""
        return chain.from_iterable(self._elements.get(name, ()) for name in containers)


def _elements(body: str) -> Iterator[tuple[bytes, Value]]:
    """Yield the keys and values of a set or a map, from the lines that describe it."""
    found = _ELEMENTS.search(body)
    for element in _ASIDE.sub("", found[1]).split(",") if found else ():
        key, _, value = element.strip().partition(" : ")
        if key:
            yield _key(key.split(" . ")), value or None


def _key(parts: Sequence[str]) -> bytes:
    """Return the key that nft prints in *parts*: addresses, then perhaps a protocol and a port."""
    if parts[-1].isdecimal():
        *addresses, protocol, port = parts
        return b"".join(map(parse_address, addresses)) + port_key(Protocol[protocol.upper()], int(port))
    return b"".join(map(parse_address, parts))

"""The file that keeps totals from one process to the next, until the machine restarts."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kproxy_core.backend.api import Carried, Connections, Failure, Handshake
from kproxy_core.host.conntrack.volumes import Volume, Volumes, Way
from kproxy_core.host.files.private import read_private, replace_private
from kproxy_core.host.namespaces import namespace_name
from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.traffic.totals import EndpointTotal, Total

log = logging.getLogger("kproxy.run")

_MOST_BYTES = 256 << 20

_PARTS = slice(0, 3), slice(3, 7), slice(7, 16)
"""The places of `Connections.failed`, `carried` and `handshakes` in an item."""
_PLACES = [one.value for kind in (Failure, Carried, Handshake) for one in kind]


class Stored(NamedTuple):
    """The content of the file."""

    mode: str = ""
    """The mode that counted."""
    totals: dict[ServicePortKey, Total] = {}  # noqa: RUF012 - immutable by agreement
    counts: Sequence[tuple[Family, Connections]] = ()
    """The last counts of that mode."""
    alive: Volumes = {}  # noqa: RUF012
    """See `VolumeReader.alive`."""


class StoredTotals:
    """Reads and writes the file. Its totals and counts are of the same reading.

    If the kernel counts without the process too, the totals are exact again after the next reading,
    even if the file is old.
    """

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / f"traffic-{namespace_name()}.json"
        self._failed = False

    def read(self, now: float) -> Stored:
        """Return the content; empty if there is no such file.

        *now* is the time that all totals get as that of their last connection.
        """
        try:
            found = json.loads(read_private(self._path, _MOST_BYTES))
            if found["boot"] != _boot_id():
                return Stored()
            totals = dict(_decode_total(item, now) for item in found["totals"])
            counts = [_decode_count(item) for item in found["counts"]]
            return Stored(str(found["mode"]), totals, counts, dict(map(_decode_way, found.get("alive", ()))))
        except FileNotFoundError:
            return Stored()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("traffic totals of the last process are not used", extra={
                "fields": {"file": str(self._path), "error": str(error)}})
            return Stored()

    def write(
        self, mode: str, totals: Mapping[ServicePortKey, Total],
        counts: Iterable[tuple[Family, Connections]], alive: Volumes,
    ) -> None:
        """Replace the file. A failure is logged once."""
        content = {
            "boot": _boot_id(), "mode": mode,
            "totals": [_encode_total(key, total) for key, total in totals.items()],
            "counts": [_encode_count(family, one) for family, one in counts],
            "alive": [_encode_way(way, volume) for way, volume in alive.items()],
        }
        try:
            replace_private(self._path, json.dumps(content, separators=(",", ":")))
        except OSError as error:
            level = logging.DEBUG if self._failed else logging.WARNING
            log.log(level, "cannot keep traffic totals across a restart", extra={
                "fields": {"file": str(self._path), "error": error.strerror}})
            self._failed = True


def _encode_total(key: ServicePortKey, total: Total) -> list[object]:
    endpoints = [[*_encode_destination(where), to.forwarded, *to.volume, *to.handshakes]
                 for where, to in total.endpoints.items()]
    return [*key, total.forwarded, total.rejected, endpoints, *total.volume, *total.handshakes]


def _decode_total(item: list[Any], now: float) -> tuple[ServicePortKey, Total]:
    namespace, name, port_name, protocol, forwarded, rejected, endpoints, *rest = item
    key = ServicePortKey(str(namespace), str(name), str(port_name), Protocol(protocol))
    known = {
        _decode_destination(address, port):
            EndpointTotal(int(number), last=now, volume=_volume(to[:4]), handshakes=tuple(map(int, to[4:])))
        for address, port, number, *to in endpoints
    }
    return key, Total(int(forwarded), {}, now, _volume(rest[:4]), tuple(map(int, rest[4:])), int(rejected),
                      known, settled=int(forwarded) + int(rejected))


def _encode_count(family: Family, one: Connections) -> list[object]:
    (address, protocol, port), endpoint, number, layer, *parts = one
    dialled = None if address is None else address.hex()
    numbers = [count for part, of in zip(parts, _PARTS, strict=True)
               for count in part or [0] * (of.stop - of.start)]
    # Three values that older versions read: they had an item for each number.
    aspects = [None, None, None, *numbers] if any(parts) else ()
    return [family.label, dialled, protocol, port, _encode_destination(endpoint), number, layer, *aspects]


def _decode_count(item: list[Any]) -> tuple[Family, Connections]:
    label, address, protocol, port, endpoint, number, layer, *aspects = item
    numbers = list(map(int, aspects[3:]))
    if aspect := next(filter(None, aspects[:3]), None):  # Of an older version.
        numbers = [int(number) * (aspect == of) for of in _PLACES]
        number = 0
    family = next(family for family in Family if family.label == label)
    dialled = None if address is None else Address(bytes.fromhex(address))
    where = _decode_destination(*endpoint) if endpoint else None
    numbers += [0] * (len(_PLACES) - len(numbers)) if numbers else []
    parts = (tuple(numbers[of]) for of in _PARTS)
    frontend = Frontend(dialled, Protocol(protocol), int(port))
    return family, Connections(frontend, where, int(number), str(layer), *parts)


def _encode_way(way: Way, volume: Volume) -> list[object]:
    return [way.family.label, way.protocol, way.destination.hex(), way.port.hex(), way.endpoint.hex(),
            way.endpoint_port.hex(), *volume]


def _decode_way(item: list[Any]) -> tuple[Way, Volume]:
    label, protocol, *names = item
    family = next(family for family in Family if family.label == label)
    destination, port, endpoint, endpoint_port = map(bytes.fromhex, names[:4])
    return (Way(family, int(protocol), Address(destination), port, Address(endpoint), endpoint_port),
            _volume(names[4:]))


def _volume(numbers: Sequence[Any]) -> Volume:
    return Volume(*map(int, numbers))


def _encode_destination(where: Destination | None) -> list[object]:
    return [] if where is None else [where.address.hex(), where.port]


def _decode_destination(address: str, port: int) -> Destination:
    return Destination(Address(bytes.fromhex(address)), int(port))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

"""The file that keeps totals from one process to the next, until the machine restarts."""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kproxy_core.host.files.private import read_private, replace_private
from kproxy_core.host.namespaces import namespace_name
from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.traffic.totals import EndpointTotal, Pair, Total

log = logging.getLogger("kproxy.run")

_MOST_BYTES = 256 << 20


class StoredTotals:
    """Reads and writes the file. Its totals and counts are of the same reading.

    If the kernel counts without the process too, the totals are exact again after the next reading,
    even if the file is old.
    """

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / f"traffic-{namespace_name()}.json"
        self._failed = False

    def read(self, now: float) -> tuple[str, dict[ServicePortKey, Total], list[tuple[Pair, int]]]:
        """Return the mode that counted, its totals and its last counts; empty if there is no such file.

        *now* is the time that all totals get as that of their last connection.
        """
        try:
            found = json.loads(read_private(self._path, _MOST_BYTES))
            if found["boot"] != _boot_id():
                return "", {}, []
            totals = dict(_decode_total(item, now) for item in found["totals"])
            return str(found["mode"]), totals, [_decode_count(item) for item in found["counts"]]
        except FileNotFoundError:
            return "", {}, []
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("traffic totals of the last process are not used", extra={
                "fields": {"file": str(self._path), "error": str(error)}})
            return "", {}, []

    def write(
        self, mode: str, totals: Mapping[ServicePortKey, Total], counts: Iterable[tuple[Pair, int]]
    ) -> None:
        """Replace the file. A failure is logged once."""
        content = {
            "boot": _boot_id(), "mode": mode,
            "totals": [_encode_total(key, total) for key, total in totals.items()],
            "counts": [_encode_count(pair, number) for pair, number in counts],
        }
        try:
            replace_private(self._path, json.dumps(content, separators=(",", ":")))
        except OSError as error:
            level = logging.DEBUG if self._failed else logging.WARNING
            log.log(level, "cannot keep traffic totals across a restart", extra={
                "fields": {"file": str(self._path), "error": error.strerror}})
            self._failed = True


def _encode_total(key: ServicePortKey, total: Total) -> list[object]:
    endpoints = [[*_encode_destination(where), to.forwarded] for where, to in total.endpoints.items()]
    return [*key, total.forwarded, total.rejected, endpoints]


def _decode_total(item: list[Any], now: float) -> tuple[ServicePortKey, Total]:
    namespace, name, port_name, protocol, forwarded, rejected, endpoints = item
    key = ServicePortKey(str(namespace), str(name), str(port_name), Protocol(protocol))
    known = {_decode_destination(address, port): EndpointTotal(int(number), last=now)
             for address, port, number in endpoints}
    return key, Total(int(forwarded), int(rejected), now, known, settled=int(forwarded) + int(rejected))


def _encode_count(pair: Pair, number: int) -> list[object]:
    family, (address, protocol, port), endpoint, layer = pair
    dialled = None if address is None else address.hex()
    return [family.label, dialled, protocol, port, _encode_destination(endpoint), number, layer]


def _decode_count(item: list[Any]) -> tuple[Pair, int]:
    label, address, protocol, port, endpoint, number, layer = item
    family = next(family for family in Family if family.label == label)
    dialled = None if address is None else Address(bytes.fromhex(address))
    where = _decode_destination(*endpoint) if endpoint else None
    return Pair(family, Frontend(dialled, Protocol(protocol), int(port)), where, str(layer)), int(number)


def _encode_destination(where: Destination | None) -> list[object]:
    return [] if where is None else [where.address.hex(), where.port]


def _decode_destination(address: str, port: int) -> Destination:
    return Destination(Address(bytes.fromhex(address)), int(port))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()



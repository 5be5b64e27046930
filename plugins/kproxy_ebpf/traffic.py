"""Traffic: connections, packets, bytes and handshakes as counted by programs."""

from typing import NamedTuple

from kproxy_core.contract import Connections, Family, Frontend
from kproxy_ebpf import names
from kproxy_ebpf.batch import frontend_family, parse_counts, parse_endpoint, parse_frontend, split_pair
from kproxy_ebpf.kernel.maps import pinned_maps
from kproxy_ebpf.settings import Settings


class _Element(NamedTuple):
    """One element of the map of counts."""

    family: Family
    value: bytes
    meaning: Connections


class Traffic:
    """The counts of one backend instance."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._read: dict[bytes, _Element] = {}
        """Elements of the last reading of their family, by key."""

    def read(self, family: Family) -> list[Connections]:
        """Raises SyncFailed."""
        before, now = self._read, {}
        with pinned_maps(self._settings) as maps:
            for key, value in () if maps is None else maps.elements(names.CONNECTIONS):
                known = before.get(key) or _new(key)
                if known.value != value and known.family is family:
                    frontend, endpoint, *_ = known.meaning
                    number, *parts = parse_counts(value)
                    known = _Element(
                        family, value, Connections(frontend, endpoint, number, names.MODE, *parts))
                now[key] = known
        self._read = now
        return [known.meaning for known in now.values() if known.family is family]


def _new(key: bytes) -> _Element:
    name, endpoint = split_pair(key)
    family = frontend_family(name)
    frontend = Frontend(*parse_frontend(name))
    return _Element(family, b"", Connections(frontend, parse_endpoint(endpoint, family), 0, names.MODE))

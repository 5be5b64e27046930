"""The maps that a proxy of this network namespace has pinned, read by another process."""

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kproxy_core.backend.errors import SyncFailed
from kproxy_core.model.address import Family
from kproxy_ebpf import names
from kproxy_ebpf.applied import Contents
from kproxy_ebpf.batch import client_key, endpoint_key, parse_pin
from kproxy_ebpf.kernel import bpf
from kproxy_ebpf.kernel.port import contents_of, namespace_cookie, pins_of
from kproxy_ebpf.settings import Settings

_READ = (*names.PER_FAMILY, names.PINS, names.CONNECTIONS)


class PinnedMaps:
    """The pinned maps. Changes nothing."""

    def __init__(self, home: Path, directory: Path) -> None:
        """*directory* has the pins of the maps, *home* those of the programs."""
        self.are_in_use = (home / "links" / names.ON_THE_WAY_OUT[0]).exists()
        """Programs that choose endpoints are attached."""
        self._maps = {name: bpf.open_pin(str(directory / name)) for name in _READ}
        self._definitions = {name: bpf.map_definition(fd) for name, fd in self._maps.items()}

    def find(self, name: str, key: bytes) -> bytes | None:
        """Return the value of one element; None: it does not exist."""
        return bpf.lookup(self._maps[name], key, self._definitions[name].value)

    def pinned_endpoint(self, service: bytes, affinity_seconds: int) -> bytes | None:
        """Return the endpoint to which a service has pinned the node's own clients; None: to none."""
        value = self.find(names.PINS, client_key(namespace_cookie(), service))
        if value is None:
            return None
        seen, endpoint = parse_pin(value)
        if time.monotonic_ns() - seen >= affinity_seconds * 1_000_000_000:
            return None
        return endpoint if self.find(names.ENDPOINTS, endpoint_key(endpoint, service)) is not None else None

    def contents(self, family: Family) -> Contents:
        return contents_of(family, self._maps, self._definitions)

    def elements(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        return bpf.elements(self._maps[name], self._definitions[name])

    def close(self) -> None:
        for descriptor in self._maps.values():
            os.close(descriptor)


@contextmanager
def pinned_maps(settings: Settings) -> Iterator[PinnedMaps | None]:
    """Yield the maps of this network namespace; None: no proxy has pinned any. Raises SyncFailed."""
    home = pins_of(settings)
    try:
        directory = next(home.glob("maps-*"), None)
        if directory is None:
            yield None
            return
        with closing(PinnedMaps(home, directory)) as maps:
            yield maps
    except OSError as error:
        raise SyncFailed(f"cannot read the BPF maps in {home}: {error.strerror}") from error

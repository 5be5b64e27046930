"""The maps that a proxy of this network namespace has pinned, read by another process."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

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

    def __init__(self, maps: Mapping[str, int], *, are_in_use: bool) -> None:
        """*maps* are descriptors by name. Raises OSError."""
        self.are_in_use = are_in_use
        """Programs that choose endpoints are attached."""
        self._maps = maps
        self._definitions = {name: bpf.map_definition(fd) for name, fd in maps.items()}

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


@contextmanager
def pinned_maps(settings: Settings) -> Iterator[PinnedMaps | None]:
    """Yield the maps of this network namespace; None: no proxy has pinned any. Raises SyncFailed."""
    home = pins_of(settings)
    try:
        directory = next(home.glob("maps-*"), None)
        if directory is None:
            yield None
            return
        with ExitStack() as opened:
            maps = {}
            for name in _READ:
                maps[name] = bpf.open_pin(str(directory / name))
                opened.callback(os.close, maps[name])
            are_in_use = (home / "links" / names.ON_THE_WAY_OUT[0]).exists()
            yield PinnedMaps(maps, are_in_use=are_in_use)
    except OSError as error:
        raise SyncFailed(f"cannot read the BPF maps in {home}: {error.strerror}") from error

"""Serves the hook `kproxy_traffic`: the connections, bytes and handshakes that programs count."""

from kproxy_core.backend.api import Carried, Connections, Failure, Handshake
from kproxy_core.model.address import Family
from kproxy_core.plan.service_plan import Frontend
from kproxy_ebpf import names
from kproxy_ebpf.batch import frontend_family, parse_count, parse_endpoint, parse_frontend
from kproxy_ebpf.kernel.pinned import pinned_maps
from kproxy_ebpf.settings import Settings

_ASPECTS: tuple[tuple[Failure | None, Carried | None, Handshake | None], ...] = (
    (None, None, None),
    *((failure, None, None) for failure in Failure),
    *((None, carried, None) for carried in Carried),
    *((None, None, handshake) for handshake in Handshake),
)
"""The meaning of each number of an element, as in `Connections`."""


def connections(family: Family, settings: Settings) -> list[Connections]:
    """Return the new connections that programs counted, their bytes and handshakes. Raises SyncFailed."""
    found = []
    with pinned_maps(settings) as maps:
        for key, value in () if maps is None else maps.elements(names.CONNECTIONS):
            name, endpoint, numbers = parse_count(key, value)
            if frontend_family(name) is family:
                frontend, where = Frontend(*parse_frontend(name)), parse_endpoint(endpoint, family)
                for number, aspects in zip(numbers, _ASPECTS, strict=True):
                    if number:
                        found.append(Connections(frontend, where, number, names.MODE, *aspects))
    return found

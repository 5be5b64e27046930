"""Serves the hook `kproxy_traffic`: the connections that programs count."""

from kproxy_core.backend.api import Connections
from kproxy_core.model.address import Family
from kproxy_core.plan.service_plan import Frontend
from kproxy_ebpf import names
from kproxy_ebpf.batch import frontend_family, parse_count, parse_endpoint, parse_frontend
from kproxy_ebpf.kernel.pinned import pinned_maps
from kproxy_ebpf.settings import Settings


def connections(family: Family, settings: Settings) -> list[Connections]:
    """Return the new connections that programs counted. Raises SyncFailed."""
    found = []
    with pinned_maps(settings) as maps:
        for key, value in () if maps is None else maps.elements(names.CONNECTIONS):
            frontend, endpoint, number = parse_count(key, value)
            if frontend_family(frontend) is family:
                where = parse_endpoint(endpoint, family)
                found.append(Connections(Frontend(*parse_frontend(frontend)), where, number, names.MODE))
    return found

"""The ``ipvs`` section of the configuration file."""

from collections.abc import Iterable
from typing import NamedTuple

from kproxy_core.contract import BackendSettings, Cidr, InvalidOption, parse_cidr

SCHEDULERS = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh")
"""The kernel's schedulers that can serve a Service."""


class Settings(NamedTuple):
    scheduler: str = "rr"
    exclude_cidrs: tuple[Cidr, ...] = ()
    """Networks in which other tools own the virtual servers."""
    strict_arp: bool = False
    timeouts: tuple[int, ...] = (0, 0, 0)
    """Timeouts of IPVS connections (TCP, TCP after FIN, UDP) in whole seconds; 0 keeps the kernel's value."""


def read_settings(settings: BackendSettings) -> Settings:
    """Read kube-proxy's fields, with its defaults. Raises InvalidOption for an unknown scheduler."""
    options = settings.options
    scheduler = str(options.get("scheduler") or "rr")
    if scheduler not in SCHEDULERS:
        raise InvalidOption(settings, "scheduler", scheduler, f"must be one of {', '.join(SCHEDULERS)}")
    return Settings(
        scheduler,
        read_excluded(settings),
        options.get("strictARP") is True,
        tuple(_seconds(options.get(name)) for name in ("tcpTimeout", "tcpFinTimeout", "udpTimeout")),
    )


def read_excluded(settings: BackendSettings) -> tuple[Cidr, ...]:
    """Return the networks in which other tools own the virtual servers."""
    excluded = settings.options.get("excludeCIDRs") or ()
    return tuple(parse_cidr(str(text)) for text in excluded) if isinstance(excluded, Iterable) else ()


def _seconds(value: object) -> int:
    return int(value) if isinstance(value, int | float) and value > 0 else 0

"""The section ``backendOptions.userspace`` of the configuration file."""

import re
from contextlib import suppress
from typing import NamedTuple

from kproxy_core.contract import (
    Address,
    BackendSettings,
    Duration,
    Family,
    InvalidOption,
    is_loopback,
    parse_address,
)
from kproxy_core.linux.relay.orders import WorkerSettings

FOREVER = -1.0
ROOTLESS = "or serve without portals: --userspace-listen ADDRESS"
"""The remedy where addresses cannot be redirected."""
OLD_OPTION = "removedEndpoints"
"""Of kproxy 0.2.0. `kproxy.removedEndpoints` applies to all modes, and spares endpoints that still serve."""

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5})|\+(\d{1,5}))?")


class Settings(NamedTuple):
    """The options of the mode. Times are seconds."""

    listen: Address | None = None
    """Local address at which the ports of Services are bound, without portals; None: use portals."""
    bind: Address | None = None
    """Local address of relays, and destination of portals; None: every address."""
    port_range: range | None = None
    """Ports of relays; None: chosen by the kernel."""
    of_workers: WorkerSettings = WorkerSettings(0.25, FOREVER, 3600.0)
    """By default no time limit for connections to a removed endpoint, as in kube-proxy, and for half-closed
    connections that of conntrack.tcpCloseWaitTimeout."""
    workers: int = 0
    """Number of relay processes; 0: one for each processor."""
    check_seconds: float = 30.0
    """Interval of checks that the portals exist."""
    counts_connections: bool = False
    """See `BackendSettings.count_traffic`."""

    def bind_in(self, family: Family) -> Address | None:
        """Return `bind` if it is an address of *family*."""
        return self.bind if self.bind is not None and len(self.bind) == family.size else None

    def redirects_to_interface(self, family: Family) -> bool:
        """Return whether portals send packets to an address of the interface by which they arrive.

        The kernel drops those from an interface without one. In IPv6, each interface has an address.
        """
        return family is Family.IPV4 and self.listen is None and self.bind_in(family) is None


def read_settings(settings: BackendSettings) -> Settings:
    """Return the options in effect. Raises InvalidOption."""
    drain = {"leave": FOREVER, "close": 0.0, "drain": _duration(settings, "drainTimeout", 30.0)}
    removed = settings.options.get(OLD_OPTION, "leave")
    if removed not in tuple(drain):
        raise InvalidOption(settings, OLD_OPTION, removed, "must be leave, close or drain")
    return Settings(
        listen=_address(settings, "listen"),
        bind=_bind(settings),
        port_range=_port_range(settings),
        of_workers=WorkerSettings(
            udp_idle=_duration(settings, "udpIdleTimeout", 0.25),
            drain=drain[str(removed)],
            half_closed=_duration(settings, "halfClosedTimeout", 3600.0),
        ),
        workers=_workers(settings),
        check_seconds=_duration(settings, "syncPeriod", 30.0),
        counts_connections=settings.count_traffic,
    )


def parse_port_range(text: str) -> range | None:
    """Return the ports that ``a-b``, ``a+n`` or ``a`` names; None without a range: empty, 0 or 0-0.

    Raises ValueError.
    """
    found = _RANGE.fullmatch(text.strip() or "0")
    if found is None:
        raise ValueError("must be a range of ports such as 10000-20000 or 10000+500")
    first = int(found[1])
    last = int(found[2] or first) + int(found[3] or 0)
    if first == last == 0:
        return None
    if not 0 < first <= last <= 65535:
        raise ValueError("must be within 1 to 65535, the first port not after the last")
    return range(first, last + 1)


def _address(settings: BackendSettings, name: str) -> Address | None:
    value = settings.options.get(name)
    if not value:
        return None
    try:
        return parse_address(str(value))
    except ValueError:
        raise InvalidOption(settings, name, value, "must be an IP address") from None


def _bind(settings: BackendSettings) -> Address | None:
    address = _address(settings, "bindAddress")
    if address is None or not any(address):
        return None
    if is_loopback(address) and not settings.options.get("listen"):
        raise InvalidOption(settings, "bindAddress", settings.options["bindAddress"],
                            "must not be a loopback address: a portal cannot redirect to it")
    return address


def _port_range(settings: BackendSettings) -> range | None:
    value = settings.options.get("portRange")
    try:
        return parse_port_range("" if value is None else str(value))
    except ValueError as error:
        raise InvalidOption(settings, "portRange", value, str(error)) from None


def _workers(settings: BackendSettings) -> int:
    value = settings.options.get("workers")
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 256:
        raise InvalidOption(settings, "workers", value, "must be a number of 0 to 256")
    return value


def _duration(settings: BackendSettings, name: str, default: float) -> float:
    value = settings.options.get(name)
    if value is None:
        return default
    seconds = 0.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str):
        with suppress(ValueError):
            seconds = float(Duration.parse(value))  # Workers get its str().
    if seconds <= 0:
        raise InvalidOption(settings, name, value, "must be a duration greater than 0, such as 250ms or 30s")
    return seconds

"""What the ``userspace`` section of the configuration file says."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from kproxy_core.backend.api import BackendSettings
from kproxy_core.backend.errors import Unsupported
from kproxy_core.model.address import Address, Family, is_loopback, parse_address
from kproxy_userspace.kernel.ports import parse_port_range

FOR_EVER = -1.0

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_DURATION = re.compile(f"({_PART.pattern})+")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Settings(NamedTuple):
    """The options of this mode; seconds throughout."""

    listen: Address | None = None
    """Serve the ports of Services at this local address, without portals; None: portals."""
    bind: Address | None = None
    """Where relays listen, and portals lead to; None: at every address."""
    port_range: range | None = None
    """Where relays listen; None: wherever the kernel says."""
    udp_idle_seconds: float = 0.25
    drain_seconds: float = FOR_EVER
    """What a connection may go on for once its endpoint is gone; FOR_EVER: kube-proxy leaves it alone."""
    workers: int = 0
    """Relay processes; 0: one for each processor."""
    check_seconds: float = 30.0
    """Between two looks at whether the portals are still there."""

    def bind_in(self, family: Family) -> Address | None:
        """`bind`, if it is an address of *family*."""
        return self.bind if self.bind is not None and len(self.bind) == family.size else None


def read_settings(settings: BackendSettings) -> Settings:
    """The options in effect. Raises Unsupported naming an option with a wrong value."""
    options = settings.options
    removed = options.get("removedEndpoints", "leave")
    if removed not in ("leave", "close", "drain"):
        raise _wrong("removedEndpoints", removed, "must be leave, close or drain")
    drain = _duration(options, "drainTimeout", 30.0)
    return Settings(
        listen=_address(options, "listen"),
        bind=_bind(options),
        port_range=_port_range(options.get("portRange")),
        udp_idle_seconds=_duration(options, "udpIdleTimeout", 0.25),
        drain_seconds={"leave": FOR_EVER, "close": 0.0}.get(str(removed), drain),
        workers=_workers(options.get("workers")),
        check_seconds=_duration(options, "syncPeriod", 30.0),
    )


def _address(options: Mapping[str, object], name: str) -> Address | None:
    value = options.get(name)
    if not value:
        return None
    try:
        return parse_address(str(value))
    except ValueError:
        raise _wrong(name, value, "must be an IP address") from None


def _bind(options: Mapping[str, object]) -> Address | None:
    address = _address(options, "bindAddress")
    if address is None or not any(address):
        return None
    if is_loopback(address) and not options.get("listen"):
        raise _wrong("bindAddress", options["bindAddress"],
                     "must not be a loopback address: no portal leads there")
    return address


def _port_range(value: object) -> range | None:
    try:
        return parse_port_range("" if value is None else str(value))
    except ValueError as error:
        raise _wrong("portRange", value, str(error)) from None


def _workers(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 256:
        raise _wrong("workers", value, "must be a number of 0 to 256")
    return value


def _duration(options: Mapping[str, object], name: str, default: float) -> float:
    value = options.get(name)
    if value is None:
        return default
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        parts = _PART.findall(str(value)) if _DURATION.fullmatch(str(value)) else ()
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds <= 0:
        raise _wrong(name, value, "must be a duration greater than 0, such as 250ms or 30s")
    return seconds


def _wrong(name: str, value: object, problem: str) -> Unsupported:
    return Unsupported(f"userspace.{name}: {value!r}: {problem}")

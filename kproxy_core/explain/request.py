"""The words of a request: a target, and a sender."""

import re
from contextlib import suppress
from typing import NamedTuple

from kproxy_core.explain.errors import NoAnswer
from kproxy_core.model.address import Address, Protocol, parse_address
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.fate import Origin
from kproxy_core.plan.service_plan import Frontend


class ServiceTarget(NamedTuple):
    """All frontends of a Service, or of one of its ports."""

    namespace: str
    """"": any"""
    name: str
    port: str | None
    """Name of the port; None: every port."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    def is_of(self, key: ServicePortKey) -> bool:
        return self.name == key.name and self.namespace in ("", key.namespace)

    def means(self, key: ServicePortKey) -> bool:
        return self.is_of(key) and self.port in (None, key.port_name)


class AddressTarget(NamedTuple):
    """All frontends at an address."""

    address: Address


Target = Frontend | ServiceTarget | AddressTarget


class Sender(NamedTuple):
    """The sender of the packets; with neither field, a typical one of each origin."""

    origin: Origin | None = None
    address: Address | None = None


_SOCKET = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>\d{1,5})(?:/(?P<protocol>\w+))?")
_SERVICE = re.compile(r"(?:(?P<namespace>[a-z0-9-]+)/)?(?P<name>[a-z0-9-]+)(?::(?P<port>[a-z0-9.-]*))?")
_FORMS = "ADDRESS[:PORT[/PROTOCOL]], node:PORT[/PROTOCOL] or [NAMESPACE/]SERVICE[:PORT NAME]"


def parse_target(text: str) -> Target:
    """Return the target that *text* names. Raises NoAnswer."""
    with suppress(ValueError):
        return AddressTarget(parse_address(text.strip("[]")))
    if found := _SOCKET.fullmatch(text):
        protocol = (found["protocol"] or "tcp").upper()
        if protocol not in Protocol.__members__:
            raise NoAnswer(f"{text!r}: protocol {found['protocol']!r} is not tcp, udp or sctp")
        port = int(found["port"])
        if not 0 < port < 65536:
            raise NoAnswer(f"{text!r}: {port} is not a port")
        host = found["v6"] or found["host"]
        try:
            address = None if host == "node" else parse_address(host)
        except ValueError as error:
            raise NoAnswer(f"{error}; a target is {_FORMS}") from error
        return Frontend(address, Protocol[protocol], port)
    if found := _SERVICE.fullmatch(text):
        return ServiceTarget(found["namespace"] or "", found["name"], found["port"])
    raise NoAnswer(f"{text!r} is not a target: give {_FORMS}")


def parse_sender(text: str, origin: str = "") -> Sender:
    """Return the sender that *text* names: ``pod``, ``node``, ``outside``, an address, or "" for all three.

    *origin* overrides what an address tells about its side. Raises NoAnswer.
    """
    sides = {side.value: side for side in Origin}
    if origin and origin not in sides:
        raise NoAnswer(f"{origin!r} is not one of {', '.join(sides)}")
    if not text or text in sides:
        if text and origin and text != origin:
            raise NoAnswer(f"the sender can't be both {text} and {origin}")
        return Sender(sides.get(text or origin))
    try:
        return Sender(sides.get(origin), parse_address(text))
    except ValueError as error:
        raise NoAnswer(f"{error}; a sender is an address, pod, node or outside") from error

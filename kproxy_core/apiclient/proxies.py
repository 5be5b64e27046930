"""Which HTTP proxy stands between us and the API server, if any."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import unquote, urlsplit


class NotAProxy(ValueError):
    """What should name a proxy does not name one that can be used."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy, reached without TLS."""

    host: str
    port: int
    authorization: str = ""
    """The value of the Proxy-Authorization header; "": none."""

    @property
    def authority(self) -> str:
        """``host:port``"""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_proxy(url: str) -> Proxy:
    """The proxy that *url* names; without a scheme it is http, as for client-go. Raises NotAProxy."""
    # The URL may hold a password, so that messages do not repeat it.
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname or "", parts.port or 80
    except ValueError as error:
        raise NotAProxy("not a URL") from error
    if parts.scheme != "http":
        raise NotAProxy(f"a proxy is reached by http:// here, not by {parts.scheme[:20]!a}")
    if not host or not all(33 <= ord(character) < 127 for character in host):
        raise NotAProxy("a URL without a host")
    if parts.username is None:
        return Proxy(host, port)
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return Proxy(host, port, "Basic " + base64.b64encode(login.encode()).decode())


def proxy_of_environment(environment: Mapping[str, str], secure: bool, host: str, port: int) -> Proxy | None:
    """The proxy that *environment* names for an API server, as Go's ``net/http`` and so client-go read it.

    That is ``HTTPS_PROXY`` if the server is asked by https (*secure*), else
    ``HTTP_PROXY``, and ``NO_PROXY`` for exceptions; upper case before lower
    case. This machine itself is never asked through a proxy. Raises NotAProxy.
    """
    def value(name: str) -> str:
        return environment.get(name) or environment.get(name.lower()) or ""

    name = "HTTPS_PROXY" if secure else "HTTP_PROXY"
    url = value(name)
    if not url or _excepted(value("NO_PROXY"), host.lower().rstrip("."), port):
        return None
    try:
        return parse_proxy(url)
    except NotAProxy as error:
        raise NotAProxy(f"{name}: {error}") from error


def _excepted(exceptions: str, host: str, port: int) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        address = None
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    for exception in exceptions.lower().split(","):
        pattern = exception.strip()
        if pattern == "*":
            return True
        if _is_network(pattern):
            if address is not None and address in ip_network(pattern, strict=False):
                return True
            continue
        try:
            parts = urlsplit(f"//{pattern}")
            name, only_port = parts.hostname or "", parts.port
        except ValueError:
            continue
        if only_port not in (None, port) or not name:
            continue
        if name.startswith("*."):
            name = name[1:]
        if host == name or (address is None and host.endswith(name if name[0] == "." else f".{name}")):
            return True
    return False


def _is_network(pattern: str) -> bool:
    try:
        ip_network(pattern, strict=False)
    except ValueError:
        return False
    return True

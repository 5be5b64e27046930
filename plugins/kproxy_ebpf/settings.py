"""The options of the mode, under ``kproxy.backendOptions.ebpf`` of the configuration file."""

from typing import NamedTuple

from kproxy_core.contract import BackendSettings, InvalidOption

DEFAULT_PIN_DIRECTORY = "/sys/fs/bpf/kproxy"


class Settings(NamedTuple):
    """The options of the mode."""

    cgroup: str = ""
    """Sockets created in this cgroup and below it are translated; "": the root of the node's cgroup2 tree."""
    clients: str = "auto"
    """Sockets to translate: ``node``, those of the node's network namespace; ``all``; ``auto``, those whose
    source address the rules would keep."""
    pin_directory: str = DEFAULT_PIN_DIRECTORY
    """Directory in a BPF file system for the pins of maps and links."""
    getpeername: bool = True
    """getpeername(2) of a TCP socket returns the address that was dialled."""
    connected_udp: bool = False
    """Translate connected UDP sockets too, and destroy those whose endpoint is removed."""
    stores_peers: bool = True
    """Programs store for each TCP socket what it dialled: for getpeername(2) or to count connections."""


def read_settings(settings: BackendSettings) -> Settings:
    """Return the options in effect. Raises InvalidOption."""
    getpeername = _boolean(settings, "getpeername", default=True)
    return Settings(
        cgroup=_path(settings, "cgroup", ""),
        clients=_choice(settings, "clients", ("auto", "all", "node")),
        pin_directory=_path(settings, "pinDirectory", DEFAULT_PIN_DIRECTORY),
        getpeername=getpeername,
        connected_udp=_choice(settings, "connectedUdp", ("rules", "destroy")) == "destroy",
        stores_peers=getpeername or settings.count_traffic,
    )


def _path(settings: BackendSettings, name: str, default: str) -> str:
    value = settings.options.get(name) or default
    if not isinstance(value, str) or (value and not value.startswith("/")) or "\0" in value:
        raise InvalidOption(settings, name, value, "must be an absolute path")
    return value


def _choice(settings: BackendSettings, name: str, choices: tuple[str, ...]) -> str:
    value = settings.options.get(name, choices[0])
    if value not in choices:
        raise InvalidOption(settings, name, value, f"must be {', '.join(choices[:-1])} or {choices[-1]}")
    return str(value)


def _boolean(settings: BackendSettings, name: str, *, default: bool) -> bool:
    value = settings.options.get(name, default)
    if not isinstance(value, bool):
        raise InvalidOption(settings, name, value, "must be true or false")
    return value

"""Flags and configuration file -> one frozen Config; an error names the option."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kproxy_core.configfile import ConfigError, FileConfig, Problem, load
from kproxy_core.model.address import Address, Cidr, format_socket

__all__ = ["ConfigError", "FileConfig", "Problem", "load"]


class DetectLocalMode(enum.Enum):
    """How traffic of this node's pods is recognised."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


NodePortAddresses = tuple[Cidr, ...] | Literal["primary"]
"""Networks whose addresses serve node ports; (): not said, the mode decides; primary: the node's own."""


class BindAddress(NamedTuple):
    """An address and TCP port that a server of this process listens on."""

    address: Address
    port: int

    def __str__(self) -> str:
        return format_socket(self.address, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConnection:
    """How to talk to the API server."""

    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = "application/vnd.kubernetes.protobuf"
    qps: float = 5.0
    burst: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Conntrack:
    """Connection tracking limits; timeouts in seconds, 0: leave as it is. max_per_core 0: leave the limits."""

    max_per_core: int = 32768
    min: int = 131072
    tcp_established_timeout: float = 86400.0
    tcp_close_wait_timeout: float = 3600.0
    tcp_be_liberal: bool = False
    udp_timeout: float = 0.0
    udp_stream_timeout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything an operator decided, checked. Periods in seconds."""

    mode: str
    """"": not said; the preferred usable backend."""
    hostname_override: str
    """Trimmed and in lower case; "": the machine's name."""
    manifests: str
    """Directory to read objects from; "": an API server."""
    master: str
    bind_address: Address
    """Overrides the detected node address unless unspecified; nothing listens on it."""
    healthz_bind_address: BindAddress
    metrics_bind_address: BindAddress
    bind_address_hard_fail: bool
    enable_profiling: bool
    detect_local_mode: DetectLocalMode
    cluster_cidrs: tuple[Cidr, ...]
    bridge_interface: str
    interface_name_prefix: str
    node_port_addresses: NodePortAddresses
    masquerade_all: bool
    masquerade_bit: int
    sync_period: float
    min_sync_period: float
    config_sync_period: float
    client: ClientConnection
    """`client.kubeconfig` is the one to use, flag or file."""
    conntrack: Conntrack
    oom_score_adj: int
    feature_gates: Mapping[str, bool]
    """Every gate this proxy knows, as it is in effect (e.g. ``AllowServiceExternalIPs``)."""
    verbosity: int
    logging_format: Literal["text", "json"]
    backend_options: Mapping[str, object]
    """The mode's own section of the file, names as in the file."""
    notices: tuple[str, ...] = ()
    """What an operator should be told although nothing is wrong enough to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The command line, each flag under its own name; None: not given."""

    mode: str | None = None
    manifests: str | None = None
    master: str | None = None
    kubeconfig: str | None = None
    hostname_override: str | None = None
    v: int | None = None
    logging_format: str | None = None
    bind_address: str | None = None
    healthz_bind_address: str | None = None
    metrics_bind_address: str | None = None
    detect_local_mode: str | None = None
    cluster_cidr: str | None = None
    pod_bridge_interface: str | None = None
    pod_interface_name_prefix: str | None = None
    nodeport_addresses: str | None = None
    """Separated by commas."""
    masquerade_all: bool | None = None


def resolve(flags: Flags, file: FileConfig | None) -> Config:
    """The configuration in effect.

    A file replaces the flags, as in kube-proxy, except ``--mode``, ``--manifests``, ``--master``,
    ``--hostname-override``, ``--v`` and ``--logging-format``; others that were given get a notice.
    Raises ConfigError with every problem found.
    """
    raise NotImplementedError


def parse_node_port_addresses(words: Iterable[str]) -> NodePortAddresses:
    """CIDRs, or the single word ``primary``. Raises ValueError."""
    raise NotImplementedError

"""The contract of backends: everything that the author of a plugin imports."""

from kproxy_core.contract.backend import Backend, LayeredBackend
from kproxy_core.contract.errors import BackendError, InvalidOption, SyncFailed, TrustLost, Unsupported
from kproxy_core.contract.hooks import hookimpl
from kproxy_core.contract.values import (
    CONTRACT,
    BackendSettings,
    Carried,
    Caveat,
    Connections,
    Damage,
    Description,
    Detection,
    Failure,
    Handshake,
    KernelObject,
    KernelSide,
    Leftovers,
    Measurement,
    Preview,
    Question,
    Requirement,
    Scope,
    SyncedFamily,
    SyncReport,
    Trial,
    Update,
    sync_family,
)
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Address, Family, Protocol, format_address, format_socket
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.plan.fate import Fate, Outcome, Packet
from kproxy_core.plan.service_plan import Frontend, ServicePlan

__all__ = [
    "CONTRACT",
    "Address",
    "Backend",
    "BackendError",
    "BackendSettings",
    "Carried",
    "Caveat",
    "Connections",
    "Damage",
    "Description",
    "Destination",
    "Detection",
    "Failure",
    "Family",
    "Fate",
    "Frontend",
    "Handshake",
    "HostError",
    "InvalidOption",
    "KernelObject",
    "KernelSide",
    "LayeredBackend",
    "Leftovers",
    "Measurement",
    "NodeView",
    "Outcome",
    "Packet",
    "Preview",
    "Protocol",
    "Question",
    "Requirement",
    "Scope",
    "ServicePlan",
    "ServicePortKey",
    "SyncFailed",
    "SyncReport",
    "SyncedFamily",
    "Trial",
    "TrustLost",
    "Unsupported",
    "Update",
    "format_address",
    "format_socket",
    "hookimpl",
    "sync_family",
]

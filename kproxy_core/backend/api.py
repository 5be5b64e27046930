"""The values that cross the border between the core and a backend.

`CONTRACT` is (major, minor): fields and optional hook arguments may be added
with a new minor, meanings change only with a new major.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan

CONTRACT = (1, 3)


@dataclass(frozen=True, slots=True)
class Description:
    """What a backend says about itself without touching the kernel."""

    mode: str
    """The name an operator selects: lower case letters, digits and dashes."""
    summary: str
    contract: tuple[int, int]
    """The CONTRACT it was written for, as a literal."""
    preference: int = 0
    """Without ``--mode`` the usable backend with the highest one is taken."""
    default_node_port_addresses: tuple[str, ...] = ()
    """What an empty nodePortAddresses means: () all addresses, ``("primary",)`` the node's own."""
    fallback: str = ""
    """The mode to serve in where this one is asked for and the machine lacks what it needs; "": none."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces that the mode makes for itself: their addresses are not the node's."""
    base: str = ""
    """The mode that this one stands on: the core makes that mode's backend too, and this one's hooks wrap its
    (``@hookimpl(wrapper=True)``). "": none."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One thing a backend needs, as found on this machine."""

    what: str
    met: bool
    found: str
    """What was looked at and seen, e.g. ``nft 1.0.6``."""
    remedy: str = ""
    """What an operator can do about it; "" when met."""
    guessed: bool = False
    """Concluded from versions or files; the thing itself was not tried."""


@dataclass(frozen=True, slots=True)
class Detection:
    """Whether a mode works here, and why."""

    mode: str
    requirements: tuple[Requirement, ...]

    @property
    def usable(self) -> bool:
        return all(requirement.met for requirement in self.requirements)

    @property
    def refuted(self) -> bool:
        """It certainly does not: something is missing, and that is not only a guess."""
        return any(not requirement.met and not requirement.guessed for requirement in self.requirements)

    @property
    def because(self) -> str:
        """One line: what is missing, or what was found."""
        missing = [r for r in self.requirements if not r.met]
        if missing:
            return "; ".join(f"{r.what}: {r.found}. {r.remedy}".rstrip() for r in missing)
        return ", ".join(r.found for r in self.requirements)


class Trial(Protocol):
    """Where a plugin may try what it needs, for real."""

    def enter(self) -> str:
        """Move this process into an empty network namespace that ends with it, there to change anything.

        "" once there, with CAP_NET_ADMIN; else why it is impossible. What is to be found out about the
        node's own namespace, privileges included, has to be found out before.
        """


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a clean-up removed, or in a dry run would remove."""

    mode: str
    removed: tuple[str, ...] = ()
    """One line per object, in the words of the field: ``table ip kproxy``."""
    errors: tuple[str, ...] = ()
    waiting: int = 0
    """Established connections for whose sake something stays (see `hookspecs.kproxy_retire`)."""

    @classmethod
    def merged(cls, mode: str, found: "Iterable[Leftovers]") -> "Leftovers":
        """Return several answers about *mode* as one."""
        answers = list(found)
        return cls(
            mode,
            tuple(line for answer in answers for line in answer.removed),
            tuple(line for answer in answers for line in answer.errors),
            sum(answer.waiting for answer in answers),
        )


class Caveat(NamedTuple):
    """Something that a mode does not do as a Service asks, or not as other modes do."""

    what: str
    """In the words of the field: ``node port 30080 is not served on 127.0.0.1``."""
    service_port: ServicePortKey | None = None
    """Whom it concerns; None: the node."""
    lost: bool = True
    """Traffic that another mode serves is not served, or a promise is not kept; else it only differs."""
    only_here: bool = False
    """It was asked for, and no other mode does it: who leaves this mode loses it."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """What a backend is made with. It may change only by making a new one."""

    families: tuple[Family, ...]
    masquerade_bit: int = 14
    options: Mapping[str, object] = field(default_factory=dict)
    """What the configuration file has for this backend alone: its section among kube-proxy's, if it has
    one, and what stands under ``kproxy.backendOptions`` for its mode."""
    loopback_node_ports: tuple[Family, ...] = tuple(Family)
    """In which families nodePortAddresses includes loopback, as `NodeView.node_ports_on_loopback` says."""


class Damage(Protocol):
    """Called from any thread when somebody else changed what the backend programmed."""

    def __call__(self, family: Family, what: str) -> None: ...


class Scope(enum.Enum):
    """How much an update covers."""

    CHANGED = "partial"
    """Only `Update.changed` is new."""
    RESYNC = "full"
    """Nothing that the backend remembers is to be believed: compare with the kernel."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one family of the kernel must be brought to."""

    family: Family
    scope: Scope
    node: NodeView
    changed: Mapping[ServicePortKey, ServicePlan | None]
    """The service ports that changed; None: gone. In a RESYNC: what changed since the last success."""
    plans: Mapping[ServicePortKey, ServicePlan]
    """Every service port there is, `changed` included. Only valid during the call."""
    node_changed: bool = False
    """`node` differs from that of the last successful update."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a successful sync did."""

    operations: int
    """Kernel objects written or deleted for service ports and the node, constant rules not counted;
    0 when everything was as it should be."""
    detail: Mapping[str, int] = field(default_factory=dict)
    """Counts worth a log field, by name."""
    unserved: Mapping[ServicePortKey, str] = field(default_factory=dict)
    """Service ports that the kernel can't be brought to for now, or not at all of their frontends, and why:
    their own trouble alone, such as a port that somebody else has. Everything else is done. They are among
    `Update.changed` again soon, after a growing delay."""


class Measurement(NamedTuple):
    """One value that a backend counts by itself, for the metrics endpoint."""

    name: str
    """As in Prometheus; that of a counter ends in ``_total``."""
    about: str
    kind: Literal["counter", "gauge"]
    value: float
    labels: Mapping[str, str] = {}


class Backend(Protocol):
    """One kernel mechanism, programmed. Called from one thread; registered with the plugin manager.

    An implementation marks these methods with `kproxy_core.backend.hookspecs.hookimpl`.
    """

    def kproxy_sync(self, update: Update) -> SyncReport:
        """See `hookspecs.kproxy_sync`."""

    def kproxy_render(self, update: Update) -> str:
        """See `hookspecs.kproxy_render`."""

    def kproxy_watch(self, damaged: Damage) -> bool:
        """See `hookspecs.kproxy_watch`."""

    def kproxy_close(self) -> None:
        """See `hookspecs.kproxy_close`."""

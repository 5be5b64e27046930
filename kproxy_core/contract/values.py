"""Values that the core and a backend exchange."""

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct, field

from kproxy_core.model.address import Address, Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.requirement import Requirement as Requirement  # a part of the contract
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.plan.fate import Fate, Packet
from kproxy_core.plan.service_plan import Frontend, ServicePlan

CONTRACT = (1, 1)
"""Major and minor version. A new minor may add fields, optional hook arguments and names to import; only a
new major changes meanings."""


class Description(Struct, frozen=True):
    """A backend's description of itself. Making it must not touch the kernel."""

    mode: str
    """The name an operator selects: lower case letters, digits and dashes."""
    summary: str
    contract: tuple[int, int]
    """The CONTRACT it was written for, as a literal."""
    preference: int = 0
    """Without ``--mode``, the usable backend with the highest preference serves."""
    default_node_port_addresses: tuple[str, ...] = ()
    """Meaning of an empty nodePortAddresses: () all addresses, ``("primary",)`` the node's own."""
    fallback: str | tuple[str, ...] = ""
    """The mode that serves instead if this machine lacks what this one needs; or several, the best first.

    "" means none.
    """
    interfaces: tuple[str, ...] = ()
    """Network interfaces that the mode creates for itself; their addresses are not the node's."""
    base: str = ""
    """The mode that this one stands on: the core makes that mode's backend first, and this one's on top of it
    (`backend.LayeredBackend`). "": none."""
    forwards: bool = True
    """The kernel of this node forwards the packets of Services. False: processes of the mode open connections
    of their own to endpoints, so that the node need not forward."""
    options: tuple[str, ...] | None = None
    """Names of the mode's options in ``kproxy.backendOptions``, without those of its base. A start with any
    other name fails. None: any may be given."""


class Detection(Struct, frozen=True):
    """The requirements of a mode, as found on this machine."""

    requirements: tuple[Requirement, ...]
    mode: str = ""
    """Set by the core."""

    @property
    def usable(self) -> bool:
        return all(requirement.met for requirement in self.requirements)

    @property
    def refuted(self) -> bool:
        """The mode certainly does not work: a requirement was tried and is not met."""
        return any(not requirement.met and not requirement.guessed for requirement in self.requirements)

    @property
    def because(self) -> str:
        """The unmet requirements, or else all findings, in one line."""
        missing = [r for r in self.requirements if not r.met]
        if missing:
            return "; ".join(f"{r.what}: {r.found}. {r.remedy}".rstrip() for r in missing)
        return ", ".join(r.found for r in self.requirements)


class Trial(Protocol):
    """A network namespace in which a plugin may try the features it needs."""

    def enter(self) -> str:
        """Move this process into an empty network namespace, which may be changed and ends with it.

        Return "" on success, with CAP_NET_ADMIN there, else the reason why it is impossible. Read everything
        about the node's own namespace, privileges included, before calling this.
        """


class Leftovers(Struct, frozen=True):
    """The result of a clean-up: removed objects, or in a dry run those that would be."""

    removed: tuple[str, ...] = ()
    """One line per object, in the words of the field: ``table ip kproxy``."""
    errors: tuple[str, ...] = ()
    waiting: int = 0
    """Established connections that still depend on the mode (see `hooks.kproxy_retire`)."""
    in_grace: bool = False
    """For some seconds more, connections that nothing can count may be on their way to the mode."""
    mode: str = ""
    """Set by the core."""

    @property
    def is_needed(self) -> bool:
        """The rest of the mode is needed for now."""
        return self.in_grace or self.waiting > 0

    @classmethod
    def merged(cls, found: "Iterable[Leftovers]", mode: str = "") -> "Leftovers":
        answers = list(found)
        return cls(
            tuple(line for answer in answers for line in answer.removed),
            tuple(line for answer in answers for line in answer.errors),
            sum(answer.waiting for answer in answers),
            any(answer.in_grace for answer in answers),
            mode,
        )


class Caveat(NamedTuple):
    """A deviation of a mode from a Service's specification, or from other modes."""

    what: str
    """In the words of the field: ``node port 30080 is not served on 127.0.0.1``."""
    service_port: ServicePortKey | None = None
    """None: the whole node."""
    lost: bool = True
    """Traffic that another mode serves is not served, or a promise is broken. False: it only differs."""
    only_here: bool = False
    """Requested, and provided by no other mode: leaving this mode loses it."""
    replaces: str = ""
    """`what` of the base's caveat about the same service port that does not apply to this mode."""


class BackendSettings(Struct, frozen=True):
    """The settings of a backend. They never change; other settings need a new backend."""

    families: tuple[Family, ...]
    masquerade_bit: int = 14
    options: Mapping[str, object] = field(default_factory=dict)
    """The part of the configuration file for this backend: its section in kube-proxy's format, if it has one,
    and its mode's entry in ``kproxy.backendOptions``."""
    loopback_node_ports: tuple[Family, ...] = tuple(Family)
    """Families in which nodePortAddresses includes loopback (`NodeView.node_ports_on_loopback`)."""
    count_traffic: bool = False
    """Count new connections for `backend.Backend.traffic`. False: spend nothing on it."""
    own_tables: bool = False
    """Have the kernel keep other processes from changing the rules, where it can."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The flag or the path in the file that set each of `options`, as `errors.InvalidOption` names it."""


class Damage(Protocol):
    """Callback for changes by other processes to the backend's objects. Callable from any thread."""

    def __call__(self, family: Family, what: str) -> None: ...


class Scope(enum.Enum):
    """The extent of an update."""

    CHANGED = "partial"
    """Only `Update.changed` and the node may differ from the last update."""
    RESYNC = "full"
    """Trust nothing that the backend remembers: compare with a fresh dump of the kernel."""


class Update(Struct, frozen=True):
    """The desired state of one family, and the changes since the last success."""

    family: Family
    scope: Scope
    node: NodeView
    changed: Mapping[ServicePortKey, ServicePlan | None]
    """The service ports that changed since the last success; None: deleted."""
    plans: Mapping[ServicePortKey, ServicePlan]
    """All service ports, including `changed`. Valid only during the call."""
    node_changed: bool = False
    """`node` or `addresses` differ from those of the last successful update."""
    addresses: frozenset[Address] = frozenset()
    """Of the node's interfaces, in both families, as far as they are known. A change that only concerns the
    other family, loopback or link-local addresses causes no update."""


class SyncReport(Struct, frozen=True):
    """The result of a successful sync."""

    operations: int
    """Kernel objects written or deleted for service ports and the node, without the constant rules. 0 if the
    kernel already held all of them."""
    detail: Mapping[str, int] = field(default_factory=dict)
    """Counts for the log line of the sync, by field name."""
    unserved: Mapping[ServicePortKey, str] = field(default_factory=dict)
    """Service ports that are not, or only partly, programmed, with the reason. The cause concerns that
    service port only, such as a port in use; everything else is programmed. After a growing delay they are in
    `Update.changed` again."""
    unfinished: frozenset[ServicePortKey] = frozenset()
    """Service ports of which only a part is written, so that others need not wait. They are served meanwhile.
    After the changes of others they are in `Update.changed` again, even if they are as before."""
    degraded: str = ""
    """Why another mechanism serves instead of this mode's, such as the rules of its base; "": none does.
    ``/healthz`` shows it, and a sync is made again after a growing delay. A switch to the mode fails."""


class Preview(NamedTuple):
    """The operations that a full sync would make now."""

    operations: int
    """Counted as in `SyncReport.operations`."""
    transaction: str
    """The operations, constant rules included, as input for the mechanism's own programs; "" if none."""


class KernelObject(NamedTuple):
    """One rule, element, virtual server or relay that a packet meets, in the order of its way."""

    where: str
    """Its place: ``chain services``, ``map vips``, ``virtual server``."""
    text: str
    """In the format of the mechanism's own program."""


class Question(Struct, frozen=True):
    """One packet, and the plan that it concerns; see `backend.Backend.explain`."""

    packet: Packet
    node: NodeView
    frontend: Frontend | None
    """None: the packet is for no frontend."""
    plan: ServicePlan | None
    """Of the service port that owns `frontend`."""
    addresses: frozenset[Address] = frozenset()
    """Of the node's interfaces, as far as they are known."""


class Translation(enum.Enum):
    """The place where an endpoint's address replaces the dialled one.

    It decides which hooks of netfilter the packet passes, and with which destination.
    """

    RULES = "nat rules, when the packet arrives or is sent"
    SOCKET = "the client's socket, before there is a packet"
    VIRTUAL_SERVER = "a virtual server of this node, which sends the packet on"
    RELAY = "a process of this node, which opens a connection of its own"


class KernelSide(Struct, frozen=True):
    """The way of one packet through the kernel's objects."""

    objects: tuple[KernelObject, ...]
    fate: Fate | None = None
    """The result that these objects give; None: they do not tell."""
    remembered: Destination | None = None
    """The endpoint to which session affinity has pinned the sender."""
    deviation: str = ""
    """The reason why this mode decides differently by design, if it does."""
    translation: Translation = Translation.RULES


class Failure(enum.Enum):
    """The reason why a connection failed that was forwarded to an endpoint."""

    REFUSED = "refused"
    """The endpoint answered the SYN with a reset."""
    UNANSWERED = "unanswered"
    """The endpoint had not answered when a second had passed."""
    RESET = "reset"
    """Ended by a reset after it was established, by either side."""


class Carried(enum.Enum):
    """Bytes or packets, and their direction."""

    PACKETS_TO_ENDPOINT = "packets_to_endpoint"
    """Without accounting in connection tracking, count none of the four."""
    TO_ENDPOINT = "to_endpoint"
    """Bytes of IP packets, headers included."""
    PACKETS_FROM_ENDPOINT = "packets_from_endpoint"
    FROM_ENDPOINT = "from_endpoint"
    """Bytes, as above."""


class Handshake(enum.Enum):
    """The duration of TCP handshakes with endpoints: ranges by their upper bound in seconds, and the sum.

    A range begins at the bound of the one before. Powers of 4 tell a node, a zone, a region and the world
    apart in eight numbers. Longer than a second takes one whose SYN, or the answer to it, was lost.
    """

    WITHIN_250_US = "0.00025"
    WITHIN_1_MS = "0.001"
    WITHIN_4_MS = "0.004"
    WITHIN_16_MS = "0.016"
    WITHIN_64_MS = "0.064"
    WITHIN_256_MS = "0.256"
    WITHIN_1_S = "1.0"
    LONGER = "+Inf"
    MICROSECONDS = "sum"
    """No connections, but what the handshakes of all of them took together."""


class Connections(NamedTuple):
    """New connections counted for one frontend and endpoint; see `backend.Backend.traffic`.

    Of UDP, a connection is a flow: the packets between two sockets until the kernel forgets them. No number
    ever falls, except to begin again at 0. Elements of the same pair and layer add up.
    """

    frontend: Frontend
    """The frontend that the client dialled: for a node port, its address may be None or the node's."""
    endpoint: Destination | None
    """None: refused, because the service port has no endpoints."""
    number: int
    """Since counting began."""
    layer: str = ""
    """Distinguishes counts of the same pair. A mode with a base counts under its own name, its base under "".
    Counts that end with an instance need a name of that instance: others of the pair are not their sequel."""
    failed: tuple[int, ...] = ()
    """Those among them that failed: a number for each `Failure`, or none. Only of those that connection
    tracking does not know by the frontend: kproxy counts all other failures itself."""
    carried: tuple[int, ...] = ()
    """Their packets and bytes: a number for each `Carried`, or none. Only of those as above."""
    handshakes: tuple[int, ...] = ()
    """Those among them that were established: a number for each `Handshake`, or none where the backend cannot
    measure it."""


IsRemoved = Callable[[Frontend | ServicePortKey, Destination], bool]
"""Returns whether connections of a service port to an endpoint are to be reset. The service port is named by
its key or by a frontend: for a node port with the address None, or the node's. Callable from any thread."""


class Measurement(NamedTuple):
    """One value for the metrics endpoint that a backend counts itself."""

    name: str
    """A Prometheus name; a counter's ends in ``_total``."""
    about: str
    kind: Literal["counter", "gauge"]
    value: float
    labels: Mapping[str, str] = {}


class Fallback(NamedTuple):
    """A replacement of one mode by another, both by name."""

    wanted: str
    serving: str
    because: str
    """The reason why the wanted mode does not work on this machine, in one line."""

    def __str__(self) -> str:
        return f"mode {self.wanted} does not work here, {self.serving} serves: {self.because}"


class SyncedFamily(Protocol):
    """One family's kernel state, as a backend keeps it."""

    def must_resync(self, node: NodeView, /) -> bool:
        """Return whether *node* affects more than the rules of its changed service ports."""

    def resync(self, node: NodeView, plans: Mapping[ServicePortKey, ServicePlan]) -> SyncReport:
        """Reconcile with *plans* from a fresh read of the kernel."""

    def change(self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None]) -> SyncReport:
        """Write the difference that *changed* makes. Costs O(changed)."""


def sync_family(state: SyncedFamily, update: Update) -> SyncReport:
    """Bring *state* to *update*: changed service ports only, or everything against a fresh dump.

    Raises whatever *state* raises.
    """
    if update.scope is Scope.RESYNC or state.must_resync(update.node):
        return state.resync(update.node, update.plans)
    return state.change(update.node, update.changed)

"""The class of backends: what the core has the one do that serves a mode."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from kproxy_core.contract.values import (
    Connections,
    Damage,
    IsRemoved,
    KernelSide,
    Leftovers,
    Measurement,
    Preview,
    Question,
    SyncReport,
    Update,
)
from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend


class Backend(ABC):
    """One kernel mechanism, programmed. Only `sync` must be implemented.

    Where a method is not, the core does without its answer. Except for those that name another thread, the
    methods are called from one thread. A switch to another mode makes a second backend beside this one.
    """

    def begin(self) -> bool:
        """Check that the mode can work, before anything depends on it. May keep what it finds out.

        Called once before this backend serves, and must answer within milliseconds. May make settings of the
        machine that serving needs. Return True if the mode can work. Raises Unsupported if it cannot, and
        another mode may be chosen; raises SyncFailed for a problem that may pass. By default
        `hooks.kproxy_detect` decides.
        """
        return False

    @abstractmethod
    def sync(self, update: Update) -> SyncReport:
        """Make the kernel agree with *update*; on return it does.

        Called once per family and batch. A failed call has remembered nothing. Raises SyncFailed, or
        TrustLost to be called again with `Scope.RESYNC`.
        """

    def relays(self, family: Family, key: ServicePortKey) -> frozenset[int]:
        """Return the ports of this node on which this process itself relays traffic of a service port.

        For modes that relay. UDP flows to these ports are not stale when endpoints disappear, because the
        relay learns of that and an answer may be under way. Called after each sync that changed the service
        port. By default there are none.
        """
        return frozenset()

    def reset_connections(self, family: Family, is_removed: IsRemoved) -> int:
        """Reset the TCP connections to removed endpoints, and return their number.

        For modes whose connections connection tracking does not know by the frontend, or whose packets bypass
        other rules: kproxy resets all other connections itself, at the client's next packet. Called within a
        second after the sync that removed an endpoint, and again while connections to one are left, also
        while the backend retires. Called as `explain`. Raises BackendError or HostError. By default there are
        none.
        """
        return 0

    def wants_relays(self, family: Family, protocol: Protocol) -> bool:
        """Return whether the core is to relay node ports on loopback: what this mode programs cannot.

        Asked before and after each sync, about TCP and UDP, where `NodeView.relays_node_ports` is set. By
        default, False: this backend serves them there itself, or not at all.
        """
        return False

    def serves_on_loopback(self, node: NodeView, address: Address, protocol: Protocol) -> bool:
        """Return whether this mode's own objects serve node ports at *address*, one of the node's loopback.

        Asked by ``kproxy explain``, where `NodeView.node_ports_on_loopback` is set. By default, False.
        """
        return False

    def needs_interface_addresses(self, family: Family) -> bool:
        """Return whether this mode loses packets from interfaces that have no address of *family*.

        Asked when all is in sync for the first time, and by ``kproxy doctor``, which name such interfaces of
        pods. By default, False.
        """
        return False

    def render(self, update: Update) -> str | None:
        """Return the complete rules for *update* as the mechanism's text. Needs no kernel and no privileges.

        Serves ``kproxy render``. By default, None: the mode has no such text.
        """
        return None

    def check_text(self, update: Update) -> str | None:
        """Return the complaint of the mechanism's own program about the text that `render` returns.

        Serves ``kproxy render --check``. Return "" if the program takes the text. Applies nothing, and
        depends on nothing that the kernel holds. Raises BackendError or HostError. By default, None: there is
        no way to check the text.
        """
        return None

    def preview(self, update: Update) -> Preview | None:
        """Return the operations with which a `Scope.RESYNC` would bring the kernel to *update* now.

        Serves ``kproxy plan`` and ``kproxy switch --check``. Reads the kernel and changes nothing. Called as
        `explain`, also where another mode serves. Raises BackendError or HostError. By default, None.
        """
        return None

    def explain(self, questions: Sequence[Question], *, live: bool) -> Sequence[KernelSide] | None:
        """Return the kernel objects that each packet meets, and the fate that these give it.

        With *live*, read them from the kernel now; without it, return those that a sync would write, which
        needs no privileges. Changes nothing. Called from another thread than `sync`, while syncs run: use
        sockets of its own. All questions are about one family. Raises BackendError or HostError. By default,
        None: only the plans are explained.
        """
        return None

    def frontends(self, family: Family) -> Sequence[Frontend] | None:
        """Return the frontends that the kernel's objects of this mode serve now, wanted or not.

        Serves ``kproxy diff``. Called as `explain`. Raises BackendError or HostError. By default, None.
        """
        return None

    def traffic(self, family: Family) -> Sequence[Connections] | None:
        """Return the new connections of each frontend and endpoint, as counted since each count began.

        Called only with `BackendSettings.count_traffic`. A sync that replaces an endpoint keeps its count.
        Numbers that are 0 may be left out, and refusals where the mode cannot count them. A count may end 90
        minutes after its last connection: after an hour, that of an hourly client would begin again at the
        same number. Called as `explain`. Raises BackendError or HostError. By default, None: nothing counts.
        """
        return None

    def watch(self, damaged: Damage) -> bool:
        """Start calling *damaged* whenever another process changes what this backend programmed.

        Called once, after the first successful sync. Return True if changes will be noticed. By default,
        False: they are not, so that the core looks for them in periodic full syncs.
        """
        return False

    def measure(self) -> Sequence[Measurement]:
        """Return values worth a metric that the core does not count itself. By default there are none.

        Called at each scrape, from another thread than `sync`. Must not raise.
        """
        return ()

    def retire(self) -> Leftovers:
        """Remove what no established connection needs, and accept no new connections: another mode serves.

        For backends that relay connections in their own process; `hooks.kproxy_retire` is for rules that
        carry them. Called every few seconds while `Leftovers.is_needed`, from another thread than `sync`,
        which is not called any more; `close` and `hooks.kproxy_cleanup` follow. Errors as in the latter. By
        default nothing is needed.
        """
        return Leftovers()

    def close(self) -> None:  # noqa: B027 - there may be nothing to do
        """Release sockets and threads; leave the kernel as it is.

        Delete only rules that redirect to this process: after it exits, another process may own those ports.
        """


P = ParamSpec("P")
R = TypeVar("R")


def _of_base(method: Callable[Concatenate[Backend, P], R]) -> Callable[Concatenate["LayeredBackend", P], R]:
    """Return a method of the same type that passes the call on to the base."""
    name = method.__name__

    @wraps(method, updated=())  # An abstract method is implemented by this.
    def call(self: "LayeredBackend", /, *arguments: P.args, **named: P.kwargs) -> R:
        answer: R = getattr(self.base, name)(*arguments, **named)
        return answer

    return call


class LayeredBackend(Backend):
    """A backend on top of its base's (`Description.base`): every method is the base's until overridden."""

    def __init__(self, base: Backend) -> None:
        self.base = base

    begin = _of_base(Backend.begin)
    sync = _of_base(Backend.sync)
    relays = _of_base(Backend.relays)
    reset_connections = _of_base(Backend.reset_connections)
    wants_relays = _of_base(Backend.wants_relays)
    serves_on_loopback = _of_base(Backend.serves_on_loopback)
    needs_interface_addresses = _of_base(Backend.needs_interface_addresses)
    render = _of_base(Backend.render)
    check_text = _of_base(Backend.check_text)
    preview = _of_base(Backend.preview)
    explain = _of_base(Backend.explain)
    frontends = _of_base(Backend.frontends)
    traffic = _of_base(Backend.traffic)
    watch = _of_base(Backend.watch)
    measure = _of_base(Backend.measure)
    retire = _of_base(Backend.retire)
    close = _of_base(Backend.close)

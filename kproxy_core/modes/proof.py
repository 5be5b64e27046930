"""Proof that a mode is at work, before anything of another mode is removed."""

import secrets
import select
import socket
import time
from collections.abc import Sequence
from functools import partial

from kproxy_core.backend.api import Scope, Update
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.model.address import Address, Protocol, format_address, format_socket
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.modes.control import ReportProgress
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_core.sync.loop import Loop

_TRIES = 3
"""Other processes may change the rules in between."""

_KEY = ServicePortKey("kproxy", "mode-switch", "probe", Protocol.TCP)

_ATTEMPTS = 3
_PATIENCE = 1.0
"""Seconds for one attempt."""


class ProofFailed(Exception):
    """The kernel's objects are not ours, or a connection failed; one line says which."""


class _ProbeImpossible(Exception):
    """No VIP to connect to, or no route to it."""


def prove(
    loop: Loop, instance: BackendInstance, updates: Sequence[Update], report_progress: ReportProgress
) -> None:
    """Check that the kernel holds *updates*, and send a connection through *instance* in each family.

    A second full sync that writes nothing proves the first. The loop must be on hold. Raises ProofFailed, or
    whatever the backend raises.
    """
    for _ in range(_TRIES):
        if not sum(loop.call(partial(instance.sync, update)).operations for update in updates):
            break
    else:
        raise ProofFailed(f"{instance.mode}: the kernel does not hold what was programmed")
    report_progress("read back: complete")
    addresses = loop.call(lambda: loop.addresses)
    for update in updates:
        try:
            report_progress(f"{update.family.label}: {_probe(loop, instance, update, addresses)} answered")
        except _ProbeImpossible as reason:
            report_progress(f"{update.family.label}: not probed: {reason}")


def _probe(loop: Loop, instance: BackendInstance, full: Update, addresses: frozenset[Address]) -> str:
    """Connect through a service port that only *instance* knows: an unused port of a ClusterIP in *full*.

    Its endpoint is in this process. *addresses* are this machine's. Returns the VIP and the port. Raises
    ProofFailed, _ProbeImpossible, or whatever the backend raises.
    """
    vip = next((p.cluster_ip for p in full.plans.values() if p.cluster_ip is not None), None)
    if vip is None:
        raise _ProbeImpossible("there is no Service with a ClusterIP")
    own = full.node.node_ip
    if own is None or own not in addresses:
        raise _ProbeImpossible("the node's address is not on this machine")
    with socket.create_server((format_address(own), 0), family=full.family.af) as listener:
        port = listener.getsockname()[1]
        name = format_socket(vip, port)
        if any(p.cluster_ip == vip and p.port == port for p in full.plans.values()):
            raise _ProbeImpossible(f"{name} belongs to a Service")
        plan = ServicePlan(
            key=_KEY, family=full.family, created="", port=port, cluster_ip=vip,
            cluster=(Destination(own, port),), hairpins=(own,), has_endpoints=True,
        )  # fmt: skip
        try:
            loop.call(partial(instance.sync, _update(full, plan)))
            problem = ""
            for _ in range(_ATTEMPTS):
                problem = _attempt(listener, vip, port)
                if not problem:
                    return name
            raise ProofFailed(f"{instance.mode}: {name} did not reach its endpoint: {problem}")
        finally:
            loop.call(partial(instance.sync, _update(full, None)))


def _update(full: Update, plan: ServicePlan | None) -> Update:
    """Return the update that adds the probe's service port; *plan* None: the one that removes it."""
    plans = full.plans if plan is None else {**full.plans, _KEY: plan}
    return Update(full.family, Scope.CHANGED, full.node, {_KEY: plan}, plans)


def _attempt(listener: socket.socket, vip: Address, port: int) -> str:
    """Connect to *vip*, and check that *listener* answers. Return the reason why it does not; "" if it does.

    Until an answer arrives, every connection to the listener is answered with the same word: also those of
    other processes, and that of a relay between both ends. Raises _ProbeImpossible without a route.
    """
    word = secrets.token_bytes(16)
    with socket.socket(listener.family) as connection:
        connection.settimeout(_PATIENCE)
        try:
            connection.connect((format_address(vip), port))
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            poll.register(listener, select.POLLIN)
            ends = time.monotonic() + _PATIENCE
            while (left := ends - time.monotonic()) > 0 and (ready := dict(poll.poll(left * 1000))):
                if connection.fileno() in ready:
                    return "" if connection.recv(len(word)) == word else "another process answered"
                with listener.accept()[0] as client:
                    client.sendall(word)
        except OSError as error:
            if "unreachable" in str(error):
                raise _ProbeImpossible(f"no route to {format_socket(vip, port)}") from error
            return str(error)
    return "timed out"

"""Proof that a mode is at work, before anything of another mode is removed."""

from collections.abc import Callable, Sequence
from functools import partial

from kproxy_core.backend.api import Update
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.model.address import Address
from kproxy_core.modes.probe import Probe, ProbeFailed, ProbeImpossible
from kproxy_core.sync.loop import Loop

_TRIES = 3
"""Other processes may change the rules in between."""

ReportProgress = Callable[[str], None]
"""Takes one line for the operator."""


class ProofFailed(Exception):
    """The kernel's objects are not ours, or a connection failed; one line says which."""


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
        except ProbeImpossible as reason:
            report_progress(f"{update.family.label}: not probed: {reason}")
        except ProbeFailed as error:
            raise ProofFailed(f"{instance.mode}: {error}") from error


def _probe(loop: Loop, instance: BackendInstance, full: Update, addresses: frozenset[Address]) -> str:
    probe = Probe(full, addresses)
    try:
        loop.call(partial(instance.sync, probe.addition))
        probe.connect()
    finally:
        loop.call(partial(instance.sync, probe.removal))
        probe.close()
    return str(probe)

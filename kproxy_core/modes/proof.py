"""Proof that a mode serves what it should, before anything of another one is removed."""

from collections.abc import Callable, Sequence
from functools import partial

from kproxy_core.backend.api import Update
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.model.address import Address
from kproxy_core.modes.probe import CanNotProbe, Probe, ProbeFailed
from kproxy_core.sync.loop import Loop

_TRIES = 3
"""Somebody else may change the rules meanwhile."""

Tell = Callable[[str], None]
"""Takes a line about what was done."""


class NotProven(Exception):
    """What was programmed is not what the kernel has, or does not work; one line says which."""


def prove(loop: Loop, instance: BackendInstance, updates: Sequence[Update], tell: Tell) -> None:
    """Read back what *instance* was given with *updates*, and send a connection through it in each family.

    The loop holds meanwhile. Raises NotProven, or what the backend raises.
    """
    for _ in range(_TRIES):
        if not sum(loop.call(partial(instance.sync, update)).operations for update in updates):
            break
    else:
        raise NotProven(f"{instance.mode}: what was programmed is not what is read back")
    tell("read back: all is there")
    addresses = loop.call(lambda: loop.addresses)
    for update in updates:
        try:
            tell(f"{update.family.label}: {_probe(loop, instance, update, addresses)} was answered")
        except CanNotProbe as reason:
            tell(f"{update.family.label}: not probed, {reason}")
        except ProbeFailed as error:
            raise NotProven(f"{instance.mode}: {error}") from error


def _probe(loop: Loop, instance: BackendInstance, full: Update, addresses: frozenset[Address]) -> str:
    probe = Probe(full, addresses)
    try:
        loop.call(partial(instance.sync, probe.come))
        probe.connect()
    finally:
        loop.call(partial(instance.sync, probe.go))
        probe.close()
    return str(probe)

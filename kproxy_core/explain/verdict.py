"""The decision beside the kernel's: the same, or the differences in words."""

from collections.abc import Iterator

from kproxy_core.backend.api import KernelSide
from kproxy_core.model.address import format_socket
from kproxy_core.plan.fate import Choice, Fate, Origin, Outcome, Packet

AGREES, DIFFERS, DEVIATES, UNKNOWN = "agrees", "differs", "deviates by design", "cannot be told"

_TOLERANCE = 0.001
"""Of shares: the kernel keeps probabilities in 31 bits."""


def judge(packet: Packet, decided: Fate, side: KernelSide) -> tuple[str, list[str]]:
    """Return the verdict about *packet*, and the differences that explain it."""
    if side.fate is None:
        return UNKNOWN, ["not every rule on the way is understood"]
    found = list(_differences(decided, side.fate, ignore_source=packet.origin is Origin.NODE))
    remembered = side.remembered
    if remembered is not None and remembered not in {choice.where for choice in decided.choices}:
        found.append(f"the sender is pinned to {format_socket(*remembered)}, which may not be chosen")
    if not found:
        return AGREES, []
    return (DEVIATES, [side.deviation, *found]) if side.deviation else (DIFFERS, found)


def _differences(decided: Fate, kernel: Fate, *, ignore_source: bool) -> Iterator[str]:
    """Yield the differences. *ignore_source*: masqueraded or not, endpoints see an address of the node."""
    if decided.outcome is not kernel.outcome:
        yield f"the packet is {kernel.outcome.value}, and should be {decided.outcome.value}"
        return
    if decided.outcome is not Outcome.FORWARDED:
        return
    wanted = {choice.where: choice for choice in decided.choices}
    held = {choice.where: choice for choice in kernel.choices}
    for where, choice in wanted.items():
        if where not in held:
            yield f"endpoint {format_socket(*where)} is missing"
        else:
            yield from _difference(choice, held[where], ignore_source=ignore_source)
    for where in held:
        if where not in wanted:
            yield f"endpoint {format_socket(*where)} may be chosen, and should not"
    lost = 1 - sum(choice.share for choice in kernel.choices)
    if lost > _TOLERANCE:
        yield f"{lost:.0%} of new connections find no endpoint"


def _difference(wanted: Choice, held: Choice, *, ignore_source: bool) -> Iterator[str]:
    text = format_socket(*wanted.where)
    if abs(wanted.share - held.share) > _TOLERANCE:
        yield f"endpoint {text} gets {held.share:.1%} of new connections, and should get {wanted.share:.1%}"
    if wanted.masqueraded is not held.masqueraded and not ignore_source:
        yield (f"endpoint {text} sees an address of the node, and should see the sender's" if held.masqueraded
               else f"endpoint {text} sees the sender's address, and should see one of the node")

"""The share of new connections that each endpoint of a service port gets: its weight, its slots.

Backends that choose by a number have a table of slots, each of which holds an endpoint. One of weight 3 is in
three of them.
"""

from collections.abc import Mapping, Sequence
from math import gcd

from kproxy_core.model.service import DEFAULT_WEIGHT, Destination, EndpointSlice, PortSpec
from kproxy_core.plan.endpoints import rows_by_slice

MOST_SLOTS = 1024
"""Limit for the slots of a service port with weights, unless it has more endpoints."""

Weights = tuple[int, ...]


def weights_of(port: PortSpec, slices: Mapping[str, EndpointSlice] | None) -> dict[Destination, int]:
    """Return the weight of each endpoint of one service port; {} if no slice has a weight.

    The slice that `endpoints_of` takes an endpoint from decides.
    """
    if not slices or all(piece.weight is None for piece in slices.values()):
        return {}
    found: dict[Destination, int] = {}
    for piece, rows in rows_by_slice(port, slices):
        weight = DEFAULT_WEIGHT if piece.weight is None else piece.weight
        for _, (where, endpoint) in rows:
            if not (endpoint.terminating and where in found):
                found[where] = weight
    return found


def reduce_weights(weights: Sequence[int], most: int = MOST_SLOTS) -> Weights:
    """Return numbers of slots in the proportion of *weights*, which are above 0; () if all are equal.

    They have no common divisor, and their sum is at most *most*: above, each is rounded to slots, but to 1 at
    least. All are equal if there are more endpoints than that.
    """
    if len(set(weights)) < 2 or len(weights) >= most:
        return ()
    divisor = gcd(*weights)
    numbers = [weight // divisor for weight in weights]
    total = sum(numbers)
    if total <= most:
        return tuple(numbers)
    slots = most
    # Light endpoints first: the others make up for what these are rounded up.
    for at in sorted(range(len(numbers)), key=numbers.__getitem__):
        number = numbers[at]
        numbers[at] = max(1, round(number * slots / total))
        slots -= numbers[at]
        total -= number
    return reduce_weights(numbers, most)


def shares(endpoints: Sequence[Destination], weights: Weights) -> dict[Destination, int]:
    """Return the share of each of *endpoints*, as a part of the sum."""
    return dict(zip(endpoints, weights, strict=True)) if weights else dict.fromkeys(endpoints, 1)


def repeated(endpoints: Sequence[Destination], weights: Weights) -> tuple[Destination, ...]:
    """Return the slots of *endpoints*: each as often as its weight says."""
    return tuple([
        where for where, weight in zip(endpoints, weights, strict=True) for _ in range(weight)])

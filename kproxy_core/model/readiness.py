"""The endpoints of a Service that were ready, and when they ceased to be."""

from collections.abc import Collection

from msgspec import Struct

from kproxy_core.model.address import Address
from kproxy_core.model.service import EndpointSlice


class LostReadiness(Struct):
    """The endpoints of one Service and family that are listed and not ready any more, and do not terminate.

    All times are the caller's clock, monotonic, in seconds.
    """

    endpoints: dict[Address, float] = {}
    """The time at which each ceased to be ready."""
    none_since: float | None = None
    """The time at which the last ready endpoint became unready or left; None: there is one, or never was."""

    def follow(
        self, before: EndpointSlice | None, after: EndpointSlice | None, slices: Collection[EndpointSlice],
        now: float,
    ) -> None:
        """Take in that the slice *before* became *after*. *slices* are all those that the Service has now.

        Costs the endpoints of that slice; and those of all *slices*, if one ceased to be ready, or had before
        and has changed.
        """
        old = before.endpoints if before is not None else ()
        new = after.endpoints if after is not None else ()
        ready = {endpoint.address for endpoint in new if endpoint.ready}
        ceased = {endpoint.address for endpoint in old if endpoint.ready} - ready
        if ready:
            self.none_since = None
        known = self.endpoints
        changed = {endpoint.address for endpoint in set(old) ^ set(new)} if known else set()
        touched = ceased | (changed & known.keys())
        if not touched:
            return
        any_ready = False
        listed = set()
        passed = set()
        for piece in slices:
            for endpoint in piece.endpoints:
                any_ready = any_ready or endpoint.ready
                if endpoint.address in touched:
                    listed.add(endpoint.address)
                    if endpoint.ready or endpoint.terminating:
                        passed.add(endpoint.address)
        for address in touched:
            if address in passed or address not in listed:
                known.pop(address, None)
            elif address in ceased:
                known[address] = now
        if ceased and not any_ready:
            self.none_since = now

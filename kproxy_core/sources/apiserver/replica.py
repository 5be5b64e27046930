"""The objects of one kind that were delivered, and the events that keep a store equal to the server."""

from collections.abc import Set
from typing import Any

from kproxy_core.objects.decode import Name, Resource
from kproxy_core.objects.reading import Reading
from kproxy_core.store.events import Complete, Event

MOST_HELD = 512 << 20
"""Limit in bytes for the encodings of all objects of one kind, far above those of the largest clusters."""

_PER_OBJECT = 1 << 10
"""Bytes that an object counts for besides its encoding: a small one takes more in memory."""


class TooMuch(Exception):
    """The objects of one kind exceed `MOST_HELD`."""

    def __init__(self) -> None:
        super().__init__(f"objects of more than {MOST_HELD} bytes")


class Replica:
    """Names and sizes of the objects that a store has of one kind.

    While everything is listed again, it also knows the objects that have not been listed yet: those left
    at the end of the list were deleted.
    """

    def __init__(self, resource: Resource[Any, Any]) -> None:
        self._resource = resource
        self._known: dict[Name, int] = {}
        """The bytes that each object counts for."""
        self._held = 0
        """The sum of them."""
        self._limit = MOST_HELD
        self._unseen: set[Name] | None = None
        """Objects not listed yet; None: no listing is under way."""
        self._unproven: set[Name] = set()
        """Objects that were new in listings since the last one that ended."""
        self.is_complete = False
        """Everything has been listed once, or nothing waits for that."""

    @property
    def is_listing(self) -> bool:
        return self._unseen is not None

    def start_listing(self) -> None:
        self._unseen = set(self._known)
        # The former objects are held until all others are known, as many as there may be.
        self._limit = MOST_HELD + self._held - self._size(self._unproven)

    def abandon_listing(self) -> None:
        """Keep everything: objects that were not listed may still exist."""
        self._unseen = None
        self._limit = MOST_HELD

    def set(self, reading: Reading[Any], size: int, events: list[Event]) -> None:
        """Add to *events* those for an object that exists, encoded in *size* bytes. Raises TooMuch."""
        name = reading.name
        if name is not None:
            counted = size + _PER_OBJECT
            known = self._known.get(name)
            held = self._held + counted - (known or 0)
            if held > max(self._held, self._limit):
                raise TooMuch
            self._held, self._known[name] = held, counted
            if self._unseen is not None:
                self._unseen.discard(name)
                if known is None:
                    self._unproven.add(name)
            events.append(self._resource.gone(name) if reading.value is None else reading.value)
        events += reading.bad

    def delete(self, name: Name) -> list[Event]:
        self._held -= self._known.pop(name, 0)
        self._unproven.discard(name)
        return [self._resource.gone(name)]

    def end_listing(self) -> list[Event]:
        """Return the events for the objects that were not listed, and the first time `Complete`.

        Raises TooMuch.
        """
        unseen = self._unseen or set()
        if self._held - self._size(unseen) > MOST_HELD:
            raise TooMuch
        events = [event for name in unseen for event in self.delete(name)]
        self._unseen = None
        self._unproven.clear()
        self._limit = MOST_HELD
        return events + self.complete()

    def drop_unproven(self) -> list[Event]:
        """Return the events that delete what too long a listing added, so that the next one has room."""
        return [event for name in list(self._unproven) for event in self.delete(name)]

    def complete(self) -> list[Event]:
        """Return `Complete`, the first time."""
        if self.is_complete:
            return []
        self.is_complete = True
        return [Complete(self._resource.plural)]

    def _size(self, names: Set[Name]) -> int:
        return sum(self._known[name] for name in names)

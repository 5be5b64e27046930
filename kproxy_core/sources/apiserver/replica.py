"""The objects of one kind that were delivered, and the events that keep a store equal to the server."""

from typing import Any

from kproxy_core.objects.decode import Name, Resource
from kproxy_core.objects.reading import Reading
from kproxy_core.store.events import Complete, Event


class Replica:
    """Names of the objects that a store has of one kind.

    While everything is listed again, it also knows the objects that have not been listed yet: those left
    at the end of the list were deleted.
    """

    def __init__(self, resource: Resource[Any, Any]) -> None:
        self._resource = resource
        self._known: set[Name] = set()
        self._unseen: set[Name] | None = None
        """Objects not listed yet; None: no listing is under way."""
        self.is_complete = False
        """Everything has been listed once, or nothing waits for that."""

    @property
    def is_listing(self) -> bool:
        return self._unseen is not None

    def start_listing(self) -> None:
        self._unseen = self._known.copy()

    def abandon_listing(self) -> None:
        """Keep everything: objects that were not listed may still exist."""
        self._unseen = None

    def set(self, reading: Reading[Any], events: list[Event]) -> None:
        """Add to *events* those for an object that exists."""
        name = reading.name
        if name is not None:
            self._known.add(name)
            if self._unseen:
                self._unseen.discard(name)
            events.append(self._resource.gone(name) if reading.value is None else reading.value)
        events += reading.bad

    def delete(self, name: Name) -> list[Event]:
        self._known.discard(name)
        return [self._resource.gone(name)]

    def end_listing(self) -> list[Event]:
        """Return the events for the objects that were not listed, and the first time `Complete`."""
        events = [event for name in self._unseen or () for event in self.delete(name)]
        self._unseen = None
        return events + self.complete()

    def complete(self) -> list[Event]:
        """Return `Complete`, the first time."""
        if self.is_complete:
            return []
        self.is_complete = True
        return [Complete(self._resource.plural)]

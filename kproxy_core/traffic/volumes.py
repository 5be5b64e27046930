"""Bytes and packets of Services: those of ended connections, and those of the ones in the kernel's table."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from kproxy_core.host.conntrack.volumes import (
    NO_VOLUME,
    SETTING,
    Volume,
    Volumes,
    Way,
    are_counted,
    read_volumes,
)
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family

log = logging.getLogger("kproxy.run")


class Growth:
    """Turns sums over ended and over living connections into what was added since the last reading. Pure.

    A connection that ends during a reading may be in neither sum. Then the sums of its way shrink, and the
    next reading has the connection among the ended ones, from which the difference is withheld; not from
    later ones, as the kernel may have lost the event.
    """

    def __init__(self, alive: Volumes) -> None:
        """*alive*: sums that are told already."""
        self.alive = alive
        self._short: dict[Way, Volume] = {}

    def add(self, ended: Volumes, alive: Volumes) -> Iterator[tuple[Way, Volume]]:
        """Take in a reading. *ended*: since the last one."""
        before, self.alive = self.alive, alive
        short, self._short = self._short, {}
        for way in {**before, **alive, **ended, **short}:
            new = _limited(ended.get(way, NO_VOLUME).plus(short.get(way, NO_VOLUME)), max)
            grown = new.plus(alive.get(way, NO_VOLUME)).minus(before.get(way, NO_VOLUME))
            if min(grown) < 0:
                self._short[way] = _limited(grown, min)
            if max(grown) > 0:
                yield way, _limited(grown, max)


def _limited(volume: Volume, limit: Callable[[int, int], int]) -> Volume:
    """Return *volume* without negative numbers if *limit* is max, without positive ones if it is min."""
    return Volume(*(limit(0, number) for number in volume))


class VolumeReader:
    """Reads the kernel's counts. `add_ended` may be called from any thread."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families
        self._growth = Growth({})
        self.is_counted = False
        """The kernel counts. If not, this reads nothing."""
        self._ended: dict[Way, Volume] = {}
        self._lock = threading.Lock()

    @property
    def alive(self) -> Volumes:
        """The sums over the connections in the table, as of the last reading."""
        return self._growth.alive

    def check(self) -> None:
        """Set `is_counted`."""
        self.is_counted = are_counted()
        if not self.is_counted:
            log.info("bytes are not counted", extra={"fields": {"because": f"{SETTING} is not 1"}})

    def start(self, alive: Volumes) -> None:
        """Start counting if the kernel does, after `add_ended` may be called.

        *alive*: sums that an earlier process has told. Without any, those of the table are taken for told.
        """
        if not self.is_counted:
            return
        try:
            self._growth = Growth(alive or self._read())
        except HostError as error:
            self.is_counted = False
            log.warning("bytes are not counted", extra={"fields": {"error": str(error)}})

    def add_ended(self, volumes: Volumes) -> None:
        """Add the sums over connections that have ended."""
        with self._lock:
            for way, volume in volumes.items():
                self._ended[way] = self._ended.get(way, NO_VOLUME).plus(volume)

    def read(self) -> Sequence[tuple[Way, Volume]]:
        """Return the growth since the last reading, by way."""
        if not self.is_counted:
            return ()
        with self._lock:
            ended, self._ended = self._ended, {}
        try:
            return list(self._growth.add(ended, self._read()))
        except HostError as error:
            log.debug("cannot read bytes of connections", extra={"fields": {"error": str(error)}})
            self.add_ended(ended)
            return ()

    def _read(self) -> Mapping[Way, Volume]:
        found: dict[Way, Volume] = {}
        for family in self._families:
            found |= read_volumes(family)
        return found

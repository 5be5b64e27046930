"""Checks, and their outcomes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from kproxy_core.model.address import Family

BOTH = (Family.IPV4, Family.IPV6)


class Failed(AssertionError):
    """The backend fails the check. The message is for its author."""


class NotApplicable(Exception):
    """The backend declares that it lacks the checked feature, or this machine cannot provide it."""


class Check(NamedTuple):
    name: str
    about: str
    """The property that must hold, in a sentence."""
    run: Callable[[Any], None]
    """Takes a `bench.Bench`. Raises Failed or NotApplicable."""
    families: tuple[Family | None, ...] = BOTH
    """Run once for each; None: once for both families together."""


def expect(condition: object, problem: str) -> None:
    """Raise Failed with *problem* unless *condition* holds."""
    if not condition:
        raise Failed(problem)


class Checks(list[Check]):
    """Checks in the order in which they run; its methods are decorators."""

    def once(self, check: Callable[[Any], None]) -> Callable[[Any], None]:
        """Add *check*, which covers both families itself."""
        return self._take(check, (None,))

    def each_family(self, check: Callable[[Any], None]) -> Callable[[Any], None]:
        """Add *check*, which runs once for each IP family."""
        return self._take(check, BOTH)

    def _take(
        self, check: Callable[[Any], None], families: tuple[Family | None, ...]
    ) -> Callable[[Any], None]:
        about = " ".join((check.__doc__ or "").split())
        self.append(Check(check.__name__.replace("_", "-"), about, check, families))
        return check

"""What a check is, and how it ends."""

from collections.abc import Callable
from typing import Any, NamedTuple

from kproxy_core.model.address import Family

BOTH = (Family.IPV4, Family.IPV6)


class Failed(AssertionError):
    """The backend does not do what the check asks for. The message is for its author."""


class NotApplicable(Exception):
    """The check asks for something that this backend says it does not do, or that can't be had here."""


class Check(NamedTuple):
    """One question, asked of a backend in a network namespace of its own."""

    name: str
    about: str
    """What must hold, in a sentence."""
    run: Callable[[Any], None]
    """Takes a `bench.Bench` or a `play.Play`. Raises Failed or NotApplicable."""
    families: tuple[Family | None, ...] = BOTH
    """Asked once for each; None: of both families at once."""


def expect(condition: object, problem: str) -> None:
    """Raise Failed with *problem* unless *condition* holds."""
    if not condition:
        raise Failed(problem)


class Checks(list[Check]):
    """Checks in the order in which they are asked; a decorator for functions that are one."""

    def once(self, check: Callable[[Any], None]) -> Callable[[Any], None]:
        """*check* looks at both families itself."""
        return self._take(check, (None,))

    def each_family(self, check: Callable[[Any], None]) -> Callable[[Any], None]:
        """*check* is asked once for each IP family."""
        return self._take(check, BOTH)

    def _take(
        self, check: Callable[[Any], None], families: tuple[Family | None, ...]
    ) -> Callable[[Any], None]:
        about = " ".join((check.__doc__ or "").split())
        self.append(Check(check.__name__.replace("_", "-"), about, check, families))
        return check

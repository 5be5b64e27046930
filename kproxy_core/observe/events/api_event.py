"""Events as in the API, and the error for one that was not written."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Regarding:
    """The object of an event. As in kube-proxy, `uid` is its name."""

    kind: str
    name: str
    namespace: str = ""

    @property
    def uid(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


@dataclass(frozen=True, slots=True)
class Event:
    """An event of events.k8s.io/v1."""

    type: str
    """``Normal`` or ``Warning``."""
    reason: str
    action: str
    regarding: Regarding
    note: str = ""


class NotWritten(Exception):
    """The server did not accept the event. `again`: it may do so later."""

    def __init__(self, problem: str, again: bool) -> None:
        super().__init__(problem)
        self.again = again

"""The switch of one node by the commands of its kproxy: checked before it, and compared after it."""

import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from kproxy_core.app.replies import ProxyStatus
from kproxy_core.fleet.answers import Verified, complaint, decode
from kproxy_core.fleet.cluster import TIMEOUT, Cluster, Node, Reply
from kproxy_core.fleet.errors import Forbidden, NoCluster, Unreached
from kproxy_core.fleet.switch import Condition, State, lasting, worse
from kproxy_core.observe.logs import printable

_LONGEST = 1800.0
"""Seconds for a switch, or for a verification, of a node with many Services."""
_RATE = 200
"""Connections per second: 1,000 Services with 3 endpoints each take half a minute."""
_SETTLES = 60.0
"""Seconds for which a node is asked what it serves, after the connection to it was lost during a switch."""

STATUS = ("kproxy", "status", "-o", "json")
_VERIFY = ("kproxy", "verify", "--traffic", f"--rate={_RATE}", "-o", "json")


def checking(mode: str) -> Sequence[str]:
    """Return the command whose answer is a `Check`."""
    return "kproxy", "switch", mode, "--check", "-o", "json"


class Caveat(Struct, frozen=True):
    what: str
    service_port: str = ""
    lost: bool = False
    only_here: bool = False

    def __str__(self) -> str:
        return f"{self.service_port}: {self.what}" if self.service_port else self.what


class Check(Struct, frozen=True):
    """The answer of ``kproxy switch --check``."""

    mode: str
    """The mode that serves."""
    appearing: Sequence[Caveat]
    disappearing: Sequence[Caveat]
    loses: bool

    @property
    def losses(self) -> tuple[str, ...]:
        """What the other mode would not serve."""
        lost = [caveat for caveat in self.appearing if caveat.lost]
        return tuple(map(str, lost + [caveat for caveat in self.disappearing if caveat.only_here]))


class _Step(Struct, frozen=True):
    step: str = ""


class NodeSwitch:
    """The switch of one node. Its steps are reported as they are made."""

    def __init__(
        self, cluster: Cluster, node: Node, report_step: Callable[[str], None], *,
        accepts_losses: bool = False, pause: float = 1.0,
    ) -> None:
        """*accepts_losses*: it is switched even if the other mode does not serve all that this one does.

        *pause*: seconds between two questions to a node that may still be switching.
        """
        self._cluster = cluster
        self._node = node
        self._report_step = report_step
        self._accepts_losses = accepts_losses
        self._pause = pause

    def run(self, mode: str) -> tuple[State, tuple[str, ...]]:
        """Switch the node to *mode*. Return what has become of it, and why it failed or is not well."""
        try:
            if refusal := self._refusal(mode):
                return State.REFUSED, refusal
            before, _ = self._condition()
        except (Forbidden, NoCluster, Unreached) as error:
            return State.LOST, (f"not switched: {_why(error)}",)
        try:
            problem = self._switch(mode)
        except (Forbidden, NoCluster, Unreached) as error:
            self._report_step(f"the connection was lost, waiting for the switch: {_why(error)}")
            problem = self._await(mode)
            if problem:
                return State.LOST, (problem,)
        if problem:
            return State.REFUSED, (problem,)
        try:
            return self._compared(mode, before)
        except (Forbidden, NoCluster, Unreached) as error:
            return State.LOST, (f"switched, and not compared with before: {_why(error)}",)

    def _refusal(self, mode: str) -> tuple[str, ...]:
        """Return why the node must not be switched; nothing: it may."""
        reply = self._ask(checking(mode))
        try:
            found = decode(self._node, reply, Check)
        except Unreached as error:
            return (error.why,)
        if found.loses and not self._accepts_losses:
            return "without --accept-losses, nothing may be lost", *found.losses
        for loss in found.losses:
            self._report_step(f"lost: {loss}")
        if not found.loses:
            self._report_step("checked: nothing would be lost")
        return ()

    def _condition(self) -> tuple[Condition, str]:
        """Return how well the node is, and the mode that serves. Raises as the cluster, or Unreached."""
        status = self._status()
        reply = self._ask(_VERIFY, _LONGEST)
        try:
            verified = decode(self._node, reply, Verified)
        except Unreached as error:
            self._report_step(f"no connections: {error.why}")
            return Condition(problems=tuple(status.problems), unclear=error.why), status.mode
        failures = {f"{one.frontend}/TCP of {one.service_port}": one.problems[0]
                    for one in verified.frontends if one.problems}
        count = len(verified.frontends)
        self._report_step(f"verified: {count - len(failures)} of {count} frontends do what the plans say")
        return Condition(problems=tuple(status.problems), failures=failures), status.mode

    def _switch(self, mode: str) -> str:
        """Switch, and return why the node refuses; "": it serves in *mode*."""
        reply = self._ask(("kproxy", "switch", mode, "-o", "json"), _LONGEST, self._report_line)
        return complaint(reply) if reply.status else ""

    def _report_line(self, line: str) -> None:
        try:
            step = msgspec.json.decode(line, type=_Step).step
        except (msgspec.MsgspecError, ValueError, RecursionError):
            step = line
        if step:
            self._report_step(printable(step))

    def _await(self, mode: str) -> str:
        """Wait until the node serves in *mode*: a switch ends without its client. Return why it does not."""
        deadline = time.monotonic() + _SETTLES
        while True:
            try:
                serving = self._status().mode
                problem = f"the connection was lost during the switch, and {serving} serves"
                if serving == mode:
                    return ""
            except (Forbidden, NoCluster, Unreached) as error:
                problem = f"the connection was lost during the switch: {_why(error)}"
            if time.monotonic() >= deadline:
                return problem
            time.sleep(self._pause)

    def _compared(self, mode: str, before: Condition) -> tuple[State, tuple[str, ...]]:
        """Compare the node with *before*. Raises as the cluster, or Unreached."""
        after, serving = self._condition()
        if worse(before, after):
            again, serving = self._condition()
            after = lasting(after, again)
        reasons = [] if serving == mode else [f"{serving} serves again"]
        if found := (*reasons, *worse(before, after)):
            return State.WORSE, found
        failing = tuple(f"{frontend}: {problem}" for frontend, problem in (after.failures or {}).items())
        return State.MOVED, (*after.problems, *failing)

    def _status(self) -> ProxyStatus:
        return decode(self._node, self._ask(STATUS), ProxyStatus)

    def _ask(
        self, command: Sequence[str], timeout: float = TIMEOUT, on_line: Callable[[str], None] | None = None
    ) -> Reply:
        return self._cluster.ask(self._node, command, timeout, on_line)


def _why(error: Exception) -> str:
    return error.why if isinstance(error, Unreached) else str(error)

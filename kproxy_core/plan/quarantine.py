"""Quarantine of silent endpoints: which ones get no new connections for now. Pure.

An endpoint that leaves connection attempts of several clients unanswered, and answers nobody meanwhile, is
taken out of this node's choice. After a while it is on trial: for a moment it gets connections again, and
what becomes of these decides.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from kproxy_core.model.address import Address
from kproxy_core.model.service import Candidate, Destination

PATIENCE = 1.0
"""Seconds without an answer after which an attempt is unanswered."""
LEAST_ATTEMPTS = 3
"""Unanswered attempts that it takes, at least."""
RECENT = 10.0
"""Seconds within which they must have begun: the kernel keeps those that clients gave up for two minutes."""
LEAST_CLIENTS = 2
"""Clients that must have made them: one alone may be at fault itself."""
FIRST_TERM = 5.0
"""Seconds until the first trial; they double, up to the longest, after each trial without an answer."""
LONGEST_TERM = 8.0
"""An endpoint that answers again is chosen within 10 s, also if no client is still trying."""

IN_QUARANTINE = "in quarantine"
"""Begins the reason why an endpoint is not chosen."""

_MOST_CASES = 4
"""Suspects that are examined at a time: each costs a walk through the table of connections."""
_EAGER = 0.25
"""Seconds after which attempts that wait are looked at again: most are answered by then."""
_LONGEST_SUSPENSE = 20.0
"""Seconds between two looks at the answers of a suspect: at first less than one."""
_ACQUITTED = 10.0
"""Seconds for which a suspect that answered is left alone."""
_GLIMPSE = 0.1
"""Seconds for which an endpoint on trial gets connections: they are lost if it is still silent."""
_WIDER = 4
"""Factor for the next trial if nobody used the last one."""
_WIDEST = 3.0
"""Seconds: an endpoint that nobody tried in a trial of this length is not in quarantine any more."""


class Attempt(NamedTuple):
    """A TCP connection whose SYN has not been answered."""

    id: bytes
    client: Address
    endpoint: Destination


class Answer(NamedTuple):
    """A TCP connection that its endpoint has answered."""

    id: bytes
    endpoint: Destination


class Answers(NamedTuple):
    """Answered connections in the order of the kernel's table, from its beginning to some limit."""

    found: Sequence[Answer] = ()
    complete: bool = True
    """The limit was not reached."""

    def new_since(self, before: "Answers") -> Iterator[Answer]:
        """Yield those that are new since an earlier reading, as far as both have read the same part."""
        known = {one.id for one in before.found}
        end = len(self.found)
        if not (self.complete and before.complete):
            end = max((at for at, one in enumerate(self.found) if one.id in known), default=0)
        return (one for one in self.found[:end] if one.id not in known)


class Sentence(NamedTuple):
    """The reason why an endpoint is in quarantine."""

    since: float
    """Monotonic seconds."""
    attempts: int
    """Attempts that were waited for, all without an answer."""

    def reason(self, now: float) -> str:
        number = self.attempts
        return f"{IN_QUARANTINE} for {now - self.since:.0f} s: {number} of {number} attempts unanswered"


Quarantined = Mapping[Destination, Sentence]


def without_quarantined(chosen: Sequence[Candidate], quarantined: Quarantined) -> Sequence[Candidate]:
    """Return *chosen* without those in quarantine: at most half of them, and the first ones of that half.

    The rest must carry the load of all, and whatever makes most endpoints silent is not their fault.
    """
    shut = [where for where, _ in chosen if where in quarantined]
    if not shut:
        return chosen
    shut.sort(key=lambda where: quarantined[where].since)
    left_out = frozenset(shut[:len(chosen) // 2])
    return [item for item in chosen if item[0] not in left_out]


@dataclass(slots=True)
class _Case:
    """A suspect, or an endpoint in quarantine."""

    began: float
    """Time of the suspicion, or of the trial."""
    before: Answers | None = None
    """What it had answered before that; None: not known yet."""
    heard_at: float = -inf
    hears_at: float = -inf
    """Time from which a suspect's answers are wanted again."""
    sentence: Sentence | None = None
    """None: it is a suspect."""
    term: float = FIRST_TERM
    until: float = 0.0
    """Time of the trial."""
    on_trial: bool = False
    glimpse: float = _GLIMPSE
    vanished: frozenset[bytes] = frozenset()
    """Attempts that wait no longer: answered, refused or given up."""

    def is_shut(self, now: float) -> bool:
        if self.sentence is None:
            return False
        is_open = self.on_trial and self.before is not None and now < self.began + self.glimpse
        return not is_open


class Wanted(NamedTuple):
    """The answers that a judge needs to hear."""

    endpoints: Sequence[Destination]
    """All answers of each."""
    of_any: bool
    """Some answers of any watched endpoints."""


class Judge:
    """Decides about the endpoints of a node, from looks at its connections. The caller supplies the time.

    A look is a call of `look`, of `hear` with what that wants, and of `quarantined`.
    """

    def __init__(self) -> None:
        self._cases: dict[Destination, _Case] = {}
        self._seen: dict[bytes, float] = {}
        """Waiting attempts, with the time of the look that found each first."""
        self._waiting: dict[Destination, list[Attempt]] = {}
        self._looks_again = False
        """The next look is soon, because endpoints may have to become suspects."""
        self._from: dict[Destination, float] = {}
        """Only attempts after this time count."""
        self._heard: tuple[float, Answers] | None = None
        """The last answers of any endpoints, and when they were read."""
        self._answered: dict[Destination, float] = {}
        """Times after which endpoints have answered."""

    @property
    def sentences(self) -> Quarantined:
        """The endpoints in quarantine, also those on trial."""
        return {where: case.sentence for where, case in self._cases.items() if case.sentence is not None}

    def quarantined(self, now: float) -> Quarantined:
        """Return the endpoints that get no new connections at *now*."""
        return {where: case.sentence for where, case in self._cases.items()
                if case.sentence is not None and case.is_shut(now)}  # fmt: skip

    def next_look(self, now: float) -> float | None:
        """Return the time at which something may be decided. None: any time in the next seconds will do."""
        times = [now + _EAGER] if self._looks_again else []
        for case in self._cases.values():
            if case.sentence is None:
                times.append(case.hears_at)
            elif not case.on_trial:
                times.append(case.until)
            else:
                shuts = case.began + case.glimpse
                times += [shuts + _EAGER, shuts + PATIENCE]
        return min((at for at in times if at > now), default=None)

    def next_end(self, now: float) -> float | None:
        """Return the time at which the next trial ends, without a look; None: there is no trial."""
        ends = (case.began + case.glimpse for case in self._cases.values() if case.on_trial)
        return min((at for at in ends if at > now), default=None)

    def look(
        self, now: float, attempts: Iterable[Attempt], watched: Container[Destination]
    ) -> Wanted:
        """Take the *attempts* that wait for an answer. Endpoints that are not *watched* any more are free."""
        before, cases = self._waiting, self._cases
        self._take(now, attempts)
        for where in [where for where in cases if where not in watched]:
            del cases[where]
        for where in self._waiting:
            if where not in cases and where in watched and self._is_suspect(where, now, _EAGER):
                cases[where] = _Case(now)
        wanted: list[Destination] = []
        for where, case in list(cases.items()):
            if case.sentence is None:
                if not self._is_suspect(where, now, _EAGER):
                    del cases[where]
                elif now >= case.hears_at:
                    wanted.append(where)
            elif case.on_trial:
                wanted.append(where)
            elif now >= case.until:
                case.on_trial, case.before = True, None
                wanted.append(where)
            else:
                ids = {one.id for one in before.get(where, ())}
                case.vanished = frozenset(ids - self._seen.keys())
                if case.vanished:
                    wanted.append(where)
        self._looks_again = not self._looks_again and any(
            self._is_suspect(where, now, 0.0) for where in self._waiting if where not in cases)
        has_suspect = any(case.sentence is None for case in self._cases.values())
        if not has_suspect:
            self._heard, self._answered = None, {}
        wanted.sort(key=lambda where: (cases[where].sentence is None, cases[where].heard_at))
        return Wanted(wanted[:_MOST_CASES], has_suspect)

    def hear(
        self, now: float, answers: Mapping[Destination, Answers], of_any: Answers | None,
        local: Container[Address],
    ) -> None:
        """Take the answers that `look` wanted. *local*: addresses of endpoints on this node."""
        if of_any is not None:
            if self._heard is not None:
                read_at, before = self._heard
                self._answered |= {one.endpoint: read_at for one in of_any.new_since(before)}
            self._heard = now, of_any
        for where, given in answers.items():
            case = self._cases[where]
            case.heard_at = now
            rest = max(PATIENCE - _EAGER / 2, (now - case.began) / 2)
            case.hears_at = now + min(rest, _LONGEST_SUSPENSE)
            if case.sentence is not None and not case.on_trial:
                if any(one.id in case.vanished for one in given.found):
                    self._acquit(where, now)
            elif case.before is None:
                case.began, case.before = now, given
            elif any(given.new_since(case.before)):
                self._acquit(where, now)
            elif case.sentence is not None:
                self._try(where, case, now)
            elif (
                self._is_suspect(where, now, PATIENCE) and self._was_tried(where, case.began)
                and self._is_network_there(where, case.began, local)
            ):
                case.sentence = Sentence(now, len(self._waiting_for(where, now, PATIENCE)))
                case.until = now + case.term

    def _take(self, now: float, attempts: Iterable[Attempt]) -> None:
        waiting: dict[Destination, list[Attempt]] = {}
        seen: dict[bytes, float] = {}
        for one in attempts:
            seen[one.id] = self._seen.get(one.id, now)
            waiting.setdefault(one.endpoint, []).append(one)
        self._seen, self._waiting = seen, waiting
        self._from = {where: at for where, at in self._from.items() if at > now or where in waiting}

    def _is_suspect(self, where: Destination, now: float, seconds: float) -> bool:
        """Return whether enough attempts of enough clients have waited for so long."""
        waiting = self._waiting_for(where, now, seconds)
        return len(waiting) >= LEAST_ATTEMPTS and len({one.client for one in waiting}) >= LEAST_CLIENTS

    def _waiting_for(self, where: Destination, now: float, seconds: float) -> list[Attempt]:
        since = max(self._from.get(where, -inf), now - RECENT)
        return [one for one in self._waiting.get(where, ())
                if since < self._seen[one.id] <= now - seconds]  # fmt: skip

    def _was_tried(self, where: Destination, since: float) -> bool:
        return any(self._seen[one.id] > since for one in self._waiting.get(where, ()))

    def _is_network_there(self, where: Destination, since: float, local: Container[Address]) -> bool:
        """Return whether another endpoint has answered: on another node, too, unless *where* is on this."""
        return any(
            at >= since and other.address != where.address and other not in self._cases
            and (where.address in local or other.address not in local)
            for other, at in self._answered.items()
        )

    def _try(self, where: Destination, case: _Case, now: float) -> None:
        """Decide about an endpoint on trial that has not answered so far."""
        if case.sentence is None or now < case.began + case.glimpse + PATIENCE:
            return
        case.on_trial, case.before = False, None
        tried = sum(self._seen[one.id] > case.began for one in self._waiting.get(where, ()))
        if tried:
            case.sentence = case.sentence._replace(attempts=case.sentence.attempts + tried)
            case.term = min(2 * case.term, LONGEST_TERM)
            case.until, case.glimpse = now + case.term, _GLIMPSE
        elif case.glimpse >= _WIDEST:
            self._acquit(where, now)
        else:
            case.until, case.glimpse = now, min(_WIDER * case.glimpse, _WIDEST)

    def _acquit(self, where: Destination, now: float) -> None:
        """Free an endpoint. One that was in quarantine may be put into it again at once."""
        was_suspect = self._cases.pop(where).sentence is None
        self._from[where] = now + _ACQUITTED if was_suspect else now

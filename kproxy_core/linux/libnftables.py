"""nft's listings of rules, and its checks of commands, by libnftables in a child process.

libnftables crashes (SIGSEGV) at sets that a newer release made, which any program on the node may have used.
"""

import json
import re
import signal
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from kproxy_core.linux import packages, programs
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.libnftables_child import NO_BINDING
from kproxy_core.linux.rulesets import all_tables
from kproxy_core.nft.listing import TableName

if TYPE_CHECKING:
    from kproxy_core.linux.trial import TrialNamespace

NftOption = Literal["handle_output", "stateless_output", "terse_output"]
"""nft's options ``-a``, ``-s`` and ``-t``."""

_CHILD: Final = Path(__file__).with_name("libnftables_child.py")
_PACKAGE: Final = "python3-nftables"
_NAME: Final = re.compile(r"[A-Za-z_.][\w/.-]*", re.ASCII)
"""Names that nft can read; the kernel takes any."""
_CRASHES: Final = {
    -number: number.name
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
}
_VERSION: Final = re.compile(r'"version": ?"([^"]+)"')


class NoBinding(HostError):
    """The Python binding or its library is not installed."""


class Crashed(HostError):
    """libnftables crashed; ``str()`` names the table that it read, if that is known."""


class CommandRefused(HostError):
    """nft refused a command; ``str()`` is its complaint."""


class Listing(NamedTuple):
    text: str
    unread: tuple[str, ...]
    """The omitted tables, each with the reason."""


class _Answer(NamedTuple):
    status: int
    output: str
    problem: str

    def text(self) -> str:
        """Return the output. Raises CommandRefused."""
        if self.status:
            raise CommandRefused(f"nft: {_first_line(self.problem)}")
        return self.output


def list_tables(family: str = "", style: Sequence[NftOption] = ()) -> Listing:
    """List all tables of *family* (``ip``, ``ip6``, ``inet``, ...; "": of every one).

    A table that crashes libnftables is omitted. Before nft 1.1.0, a terse listing skips the elements of sets
    only here, and only if no table is omitted. Raises HostError.
    """
    try:
        return Listing(_one(f"list ruleset {family}".rstrip(), style), ())
    except Crashed:
        return _list_one_by_one([table for table in all_tables() if family in ("", table.family)], style)


def list_table(family: str, table: str, style: Sequence[NftOption] = ()) -> str:
    """List one table; "" if it does not exist. Raises HostError; Crashed names the table."""
    return _list_part("table", TableName(family, table), (), style)


def list_chain(family: str, table: str, chain: str, style: Sequence[NftOption] = ()) -> str:
    """List one chain within its table, as `list_table` does. Other tables are not read."""
    return _list_part("chain", TableName(family, table), (chain,), style)


def rule_text(family: str, table: str, chain: str, handle: int) -> str:
    """Return a rule as nft writes it; "" if it has gone, or cannot be listed."""
    if not handle:
        return ""
    try:
        listed = list_chain(family, table, chain, ["handle_output"])
    except HostError:
        return ""
    mark = f" # handle {handle}"
    return next((line.strip().removesuffix(mark) for line in listed.splitlines() if line.endswith(mark)), "")


def complaint(commands: str) -> str:
    """Return the complaint about nft commands for a kernel without rules; "" if there is none.

    They are checked in a network namespace of their own, where only loopback exists. This process must have
    no other threads. Raises HostError.
    """
    from kproxy_core.linux.trial import TrialFailed, run_in_child

    try:
        found = run_in_child(partial(_complaint, commands))
    except TrialFailed as error:
        raise HostError(f"nft did not check the rules: {error}") from error
    if isinstance(found, HostError):
        raise found
    return found


def _complaint(commands: str, namespace: "TrialNamespace") -> str | HostError:
    """Return the complaint or the error: a raised one would not leave this process."""
    if why_not := namespace.enter():
        return HostError(why_not)
    try:
        answers, crash = _run([], ["dry_run"], stdin=commands)
        return f"{_library()} crashes ({crash})" if crash else answers[0].problem if answers[0].status else ""
    except HostError as error:
        return error


def _list_part(kind: str, table: TableName, names: Sequence[str], style: Sequence[NftOption]) -> str:
    for name in (table.name, *names):
        if not _NAME.fullmatch(name):
            raise CommandRefused(f"table {table}: {name!r} is a name that nft cannot read")
    try:
        return _one(" ".join(["list", kind, *table, *names]), style)
    except Crashed as error:
        raise Crashed(_unreadable(table, _library(), str(error))) from error
    except CommandRefused:
        if table not in all_tables():
            return ""
        raise


def _list_one_by_one(tables: Iterable[TableName], style: Sequence[NftOption]) -> Listing:
    """List *tables* in as few processes as possible: a new one after each that is ended. Raises HostError."""
    text, unread = "", []
    waiting = []
    for table in tables:
        if _NAME.fullmatch(table.name):
            waiting.append(table)
        else:
            unread.append(f"table {table}: {table.name!r} is a name that nft cannot read")
    while waiting:
        answers, crash = _run([f"list table {table}" for table in waiting], style)
        for table, answer in zip(waiting, answers, strict=False):
            if not answer.status:
                text += answer.output
            elif table in all_tables():
                unread.append(f"table {table}: nft: {_first_line(answer.problem)}")
        waiting = waiting[len(answers):]
        if crash:
            unread.append(_unreadable(waiting.pop(0), _library(), crash))
    return Listing(text, tuple(unread))


def _one(command: str, style: Sequence[NftOption]) -> str:
    """Return the output of one command. Raises Crashed with the signal's name only, Refused, or HostError."""
    answers, crash = _run([command], style)
    if crash:
        raise Crashed(crash)
    return answers[0].text()


def _unreadable(table: TableName, library: str, crash: str) -> str:
    return f"{library} crashes ({crash}) on table {table}, probably because a newer nft made it"


def _library() -> str:
    """Return e.g. ``libnftables 1.0.6``, as the least command tells it: it reads no sets."""
    try:
        answers, _ = _run(["list flowtables"], ["json_output"])
    except HostError:
        answers = []
    found = _VERSION.search(answers[0].output) if answers else None
    return f"libnftables {found[1]}" if found else "libnftables"


def _run(commands: Sequence[str], settings: Sequence[str], stdin: str = "") -> tuple[list[_Answer], str]:
    """Run *commands*, or *stdin* as one, in a child. Return the answers, and "" or the signal of a crash.

    After a crash, the answers end before the command that caused it. Raises HostError.
    """
    for python in interpreters():
        done = programs.run(python, "-I", str(_CHILD), *settings, "--", *commands, stdin=stdin)
        if done.returncode != NO_BINDING:
            break
    else:
        remedy = packages.remedy(_PACKAGE, _PACKAGE)
        raise NoBinding(f"the Python binding of libnftables is missing; {remedy}")
    answers = [_Answer(*json.loads(line)) for line in done.stdout.splitlines() if line.endswith("]")]
    if done.returncode and done.returncode not in _CRASHES:
        raise programs.ProgramUnfinished(f"libnftables: {programs.failure(done)}")
    return answers, _CRASHES.get(done.returncode, "")


def interpreters() -> list[str]:
    """Return the interpreters that may have the binding."""
    return packages.interpreters("nftables")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")

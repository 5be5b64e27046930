"""The ipsets of one IP family: entries over netlink, sets by the program ``ipset``."""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence

from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink.messages import NETLINK_NETFILTER
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Family
from kproxy_ipvs.batch import sets as messages
from kproxy_ipvs.names import SETS, SetKind
from kproxy_ipvs.wanted import Element

_OWN_ERRORS = 4096
"""The least error number that is ipset's own (IPSET_ERR_PRIVATE)."""
_PROBLEMS = {errno.ENOENT: "the set does not exist", 4352: "the set is full"}
"""The second is IPSET_ERR_HASH_FULL."""


def read(family: Family) -> dict[SetKind, dict[str, int]]:
    """Return all existing sets, with their entries and the entries' marks. Raises HostError."""
    found: dict[SetKind, dict[str, int]] = {}
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            for kind in SETS:
                entries = _read(sock, family, kind)
                if entries is not None:
                    found[kind] = entries
    except OSError as error:
        raise HostError("cannot read ipsets", error) from error
    return found


def _read(sock: NetlinkSocket, family: Family, kind: SetKind) -> dict[str, int] | None:
    """Return the entries of one set; None if it does not exist. Raises OSError."""
    try:
        return sock.dump(
            messages.LIST_SET, messages.list_set(family, kind),
            lambda answers: messages.decode_entries(family, kind, answers),
        )  # fmt: skip
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def create(family: Family, kinds: Iterable[SetKind]) -> None:
    """Create sets; existing ones are no error. Raises HostError."""
    _restore(messages.render(family, kinds))


def write(family: Family, adds: Iterable[Element] = (), deletes: Iterable[Element] = ()) -> None:
    """Add entries, then delete others. Entries that exist or are missing already are no error.

    Raises HostError if entries are refused, after all others are written.
    """
    batches = [
        *messages.batches(family, sorted(adds)),
        *messages.batches(family, sorted(deletes), delete=True),
    ]
    if not batches:
        return
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            refused = sock.exchange([batch.request for batch in batches])
    except OSError as error:
        raise HostError("cannot write ipsets", error) from error
    for at, code in refused:
        raise HostError(f"ipset {batches[at].name} refuses entries: {_describe(code)}")


def _describe(code: int) -> str:
    """Return the meaning of an error number of ipset."""
    return _PROBLEMS.get(code) or (f"error {code}" if code >= _OWN_ERRORS else os.strerror(code))


def destroy(names: Sequence[str]) -> dict[str, HostError]:
    """Delete sets by their full names. Return the errors by name, such as for a set that a rule uses."""
    try:
        _destroy(names)
    except HostError:  # The program has stopped at the first failure.
        return dict(_destroy_each(names))
    return {}


def _destroy_each(names: Iterable[str]) -> Iterator[tuple[str, HostError]]:
    for name in names:
        try:
            _destroy([name])
        except HostError as error:
            yield name, error


def _destroy(names: Iterable[str]) -> None:
    _restore("".join(f"destroy {name}\n" for name in names))


def _restore(text: str) -> None:
    if text:
        programs.output("ipset", "restore", "-exist", stdin=text)


def existing(kinds: Iterable[SetKind]) -> list[str]:
    """Return the full names of those sets that exist, in both families. Raises HostError."""
    ours = {kind.full_name(family) for kind in kinds for family in Family}
    return [name for name in programs.output("ipset", "list", "-name").splitlines() if name in ours]

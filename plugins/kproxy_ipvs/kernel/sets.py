"""The ipsets of one IP family, over netlink; the program ``ipset`` creates them."""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence

from kproxy_core.contract import Family, HostError
from kproxy_core.linux import programs
from kproxy_core.linux.errors import doing
from kproxy_core.netlink.messages import NETLINK_NETFILTER, NetlinkRequest
from kproxy_core.netlink.sockets import NetlinkSocket, RequestError
from kproxy_ipvs import batch
from kproxy_ipvs.names import MOST_ENTRIES, REPLACEMENT, SETS, SetKind
from kproxy_ipvs.wanted import SetEntry

_OWN_ERRORS = 4096
"""The least error number that is ipset's own (IPSET_ERR_PRIVATE)."""
_PROBLEMS = {errno.ENOENT: "the set does not exist", 4100: "a rule uses the set", 4352: "the set is full"}
"""The last two are IPSET_ERR_BUSY and IPSET_ERR_HASH_FULL."""


def read(family: Family) -> dict[SetKind, dict[str, int]]:
    """Return all existing sets, with their entries and the entries' marks. Raises HostError."""
    found: dict[SetKind, dict[str, int]] = {}
    with doing("read ipsets"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        for kind in SETS:
            if (entries := _read(sock, family, kind)) is not None:
                found[kind] = entries
    return found


def _read(sock: NetlinkSocket, family: Family, kind: SetKind) -> dict[str, int] | None:
    """Return the entries of one set; None if it does not exist. Raises OSError."""
    try:
        return sock.dump(
            batch.LIST_SET, batch.list_set(family, kind),
            lambda answers: batch.decode_entries(family, answers),
        )  # fmt: skip
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def create(family: Family, kinds: Iterable[SetKind]) -> None:
    """Create sets; existing ones are no error. Raises HostError."""
    text = batch.render(family, kinds)
    if text:
        programs.output("ipset", "restore", "-exist", stdin=text)


def widen(family: Family, held: Mapping[SetKind, Mapping[str, int]]) -> None:
    """Replace those of the *held* sets that have room for fewer entries than `create` gives them.

    kube-proxy creates such sets, and so did this mode. Rules find the same entries all the time. Raises
    HostError.
    """
    with doing("read ipsets"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        small = [
            kind for kind in held
            if 0 < sock.dump(batch.LIST_SET, batch.list_header(family, kind), batch.decode_limit)
            < MOST_ENTRIES
        ]  # fmt: skip
    if small:
        destroy([REPLACEMENT.full_name(family)])  # Of an earlier process that was killed meanwhile.
        text = "".join(batch.replace_set(family, kind, held[kind]) for kind in small)
        programs.output("ipset", "restore", stdin=text)


def write(family: Family, adds: Iterable[SetEntry] = (), deletes: Iterable[SetEntry] = ()) -> None:
    """Add entries, then delete others. Entries that exist or are missing already are no error.

    Raises HostError if entries are refused, after all others are written.
    """
    batches = [
        *batch.batches(family, sorted(adds)),
        *batch.batches(family, sorted(deletes), delete=True),
    ]
    for at, code in _exchange([request for _, request in batches]):
        raise HostError(f"ipset {batches[at][0]} refuses entries: {_describe(code)}")


def _describe(code: int) -> str:
    return _PROBLEMS.get(code) or (f"error {code}" if code >= _OWN_ERRORS else os.strerror(code))


def destroy(names: Sequence[str]) -> dict[str, HostError]:
    """Delete sets by their full names; missing ones are no error. Return the other errors by name.

    Raises HostError if no set can be deleted, such as without privileges.
    """
    refused = _exchange([batch.destroy_set(name) for name in names])
    return {names[at]: HostError(_describe(code)) for at, code in refused if code != errno.ENOENT}


def _exchange(requests: Sequence[NetlinkRequest]) -> list[RequestError]:
    """Send *requests* and return the refused ones. Raises HostError."""
    if not requests:
        return []
    with doing("write ipsets"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        return sock.exchange(requests)


def existing(kinds: Iterable[SetKind]) -> list[str]:
    """Return the full names of those sets that exist, in both families. Raises HostError."""
    ours = {kind.full_name(family) for kind in kinds for family in Family}
    return [name for name in programs.output("ipset", "list", "-name").splitlines() if name in ours]

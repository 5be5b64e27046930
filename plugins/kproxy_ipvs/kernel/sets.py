"""The ipsets of one IP family: sets by ``ipset``, their entries by netlink."""

from collections.abc import Iterable, Iterator, Sequence

from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.model.address import Family
from kproxy_ipvs.batch import sets as messages
from kproxy_ipvs.kernel.exchange import exchange
from kproxy_ipvs.names import SETS, SetKind
from kproxy_ipvs.wanted import Element


def read(family: Family) -> dict[SetKind, dict[str, int]]:
    """Every set that exists, with its entries and their marks. Raises HostError."""
    kinds = {kind.full_name(family): kind for kind in SETS}
    found: dict[SetKind, dict[str, int]] = {}
    for line in programs.output("ipset", "save").splitlines():
        words = line.split()
        kind = kinds.get(words[1]) if len(words) > 2 else None
        if kind is None:
            continue
        if words[0] == "create":
            found[kind] = {}
        else:
            mark = words[words.index("skbmark") + 1] if "skbmark" in words else "0"
            found[kind][words[2]] = int(mark.partition("/")[0], 16)
    return found


def create(family: Family, kinds: Iterable[SetKind]) -> None:
    """Create sets; those that are there may stay. Raises HostError."""
    text = messages.render(family, kinds)
    if text:
        programs.output("ipset", "restore", "-exist", stdin=text)


def write(family: Family, adds: Iterable[Element] = (), deletes: Iterable[Element] = ()) -> None:
    """Add entries, then delete others; what is as it should be is no problem.

    Without a program: its start would take longer than all the rest of most changes.
    Raises HostError if entries are refused; all others are written then.
    """
    batches = [
        *messages.batches(family, sorted(adds)),
        *messages.batches(family, sorted(deletes), delete=True),
    ]
    if not batches:
        return
    try:
        with netlink.open_socket(netlink.NETLINK_NETFILTER) as sock:
            refused = exchange(sock, [batch.request for batch in batches])
    except OSError as error:
        raise HostError("can't write ipsets", error) from error
    for at, code in refused:
        raise HostError(f"ipset {batches[at].name} refuses entries: {messages.problem(code)}")


def destroy(names: Sequence[str]) -> dict[str, HostError]:
    """Delete sets by their full names; returns why some stay, such as that a rule uses them."""
    try:
        _destroy(names)
    except HostError:  # It has stopped at the first that stays.
        return dict(_stubborn(names))
    return {}


def _stubborn(names: Iterable[str]) -> Iterator[tuple[str, HostError]]:
    for name in names:
        try:
            _destroy([name])
        except HostError as error:
            yield name, error


def _destroy(names: Iterable[str]) -> None:
    text = "".join(f"destroy {name}\n" for name in names)
    if text:
        programs.output("ipset", "restore", "-exist", stdin=text)


def existing(kinds: Iterable[SetKind]) -> list[str]:
    """The full names of those sets that exist, of both families. Raises HostError."""
    ours = {kind.full_name(family) for kind in kinds for family in Family}
    return [name for name in programs.output("ipset", "list", "-name").splitlines() if name in ours]

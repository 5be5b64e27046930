"""Portals in the kernel, written by iptables, or by nft on a machine without iptables."""

import re
from collections import Counter
from collections.abc import Sequence

from kproxy_core.backend.errors import SyncFailed, Unsupported
from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink.nf_objects import table_exists
from kproxy_core.host.programs import OwnProcesses, ProgramFailed
from kproxy_core.model.address import Address, Family
from kproxy_userspace import batch
from kproxy_userspace.names import NON_LOCAL, OUR_CHAINS, PORTAL_CHAINS, TABLE
from kproxy_userspace.questions.removal import plan_cleanup
from kproxy_userspace.skeleton import JUMPS, nft_skeleton, nft_target
from kproxy_userspace.wanted import Redirect
from kproxy_xtables.cleanup import apply_removal
from kproxy_xtables.over_netlink import dormant_tables
from kproxy_xtables.removal import describe, kubernetes_rules
from kproxy_xtables.rules import ChainKey, missing_jumps
from kproxy_xtables.tables import Tables, Unusable
from kproxy_xtables.variant import NoVariant, find_variant

_WITH_JUMPS = {(jump.table, jump.chain) for jump in JUMPS}
_COMMENT = re.compile(r' -m comment --comment (?:"[^"]*"|\S+)')
_NFT_RULES = 5
_ELEMENT = re.compile(r"([0-9a-z][0-9a-z.:/ ]*) : (\d+)")


class Portals:
    """The redirections of one family: none, where relays are bound to the ports of Services."""

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        """Replace all portals by *redirects*. Raises HostError."""

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect]) -> None:
        """Delete some portals and add others. Raises HostError."""

    def differences(self, redirects: Sequence[Redirect]) -> int:
        """Return how many rules or elements the kernel has too few or too many. Raises HostError."""
        return 0

    def withdraw(self) -> list[str]:
        """Delete all portals and return a line for each deleted object. Raises HostError.

        One rule that needs connection tracking is kept. Without any, the kernel would stop translating the
        family's established connections, those of other modes too.
        """
        return []


class IptablesPortals(Portals):
    """kube-proxy's chains, written by iptables-restore."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        self._tables.wake()
        self._tables.restore(batch.iptables_rewrite(redirects, missing_jumps(JUMPS, self._held())))

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect]) -> None:
        self._tables.restore(batch.iptables_change(deletes, adds))

    def differences(self, redirects: Sequence[Redirect]) -> int:
        wanted = Counter(
            _meaning(rule) for redirect in redirects for _, rule in batch.iptables_rules(redirect))
        held = self._held()
        found = Counter(
            _meaning(f"{key[1]} {rule}") for key, rules in held.items() if key in OUR_CHAINS
            for rule in rules
        )  # fmt: skip
        differing = (wanted - found).total() + (found - wanted).total()
        return differing + len(missing_jumps(JUMPS, held)) + len(self._tables.dormant())

    def withdraw(self) -> list[str]:
        if not may_have_portals(self._tables):
            return []
        removal = plan_cleanup(kubernetes_rules(self._tables.save("nat")))
        self._tables.restore(batch.iptables_pin())
        apply_removal(removal, self._tables)
        return [f"{self._tables.program}: {line}" for line in describe(removal)]

    def _held(self) -> dict[ChainKey, list[str]]:
        """Return our chains, and the built-in ones with jumps to them."""
        return {
            key: saved.rules
            for table in ("nat", "filter") for saved in self._tables.save(table)
            if (key := (table, saved.name)) in OUR_CHAINS or key in _WITH_JUMPS
        }  # fmt: skip


def may_have_portals(tables: Tables) -> bool:
    """Return whether a chain of the mode exists, without reading other modes' rules. Raises HostError.

    All chains of one table are created and deleted together. For legacy programs the answer is True, because
    they create a table when asked for one of its chains.
    """
    ours = (("filter", NON_LOCAL), ("nat", PORTAL_CHAINS[0]))
    return not tables.variant.nft or any(tables.has_chain(*chain) for chain in ours)


def _meaning(rule: str) -> frozenset[str]:
    """Return the words of *rule*, without its comment, and with a length for each network."""
    words = _COMMENT.sub("", rule).split()
    for number, word in enumerate(words[:-1]):
        if word in ("-d", "-s") and "/" not in words[number + 1]:
            words[number + 1] += "/128" if ":" in words[number + 1] else "/32"
    return frozenset(words)


class NftPortals(Portals):
    """The maps of our nftables table, written by nft."""

    def __init__(self, family: Family, at: Address | None, own: OwnProcesses | None = None) -> None:
        """*at* is the relays' address; None: every local address. Processes are remembered in *own*."""
        self._own = own
        self._family = family
        self._at = at
        self._table = (family.ip, TABLE)

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        self._write(batch.nft_rewrite(self._family, redirects, self._at))

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect]) -> None:
        self._write(batch.nft_change(self._family, deletes, adds))

    def _write(self, text: str) -> None:
        programs.output("nft", "-f", "-", stdin=text, own=self._own)

    def differences(self, redirects: Sequence[Redirect]) -> int:
        listed = programs.run("nft", "list", "table", *self._table).stdout
        rules = listed.count(nft_target(self._at)) + listed.count("jump portals")
        wanted = {(batch.nft_key(portal)[1], port) for portal, port, _ in redirects}
        differing = wanted.symmetric_difference(parse_elements(listed).items())
        return len(differing) + abs(_NFT_RULES - rules) + len(dormant_tables(self._family, [TABLE]))

    def withdraw(self) -> list[str]:
        return self._deleted("portals in table", "-f", "-", stdin=batch.nft_empty(self._family))

    def remove(self, *, dry_run: bool) -> list[str]:
        """Delete the table. Return a line about it if it existed. Raises HostError."""
        if not table_exists(self._family, TABLE):
            return []
        return self._deleted("table", *["--check"] * dry_run, "delete", "table", *self._table)

    def _deleted(self, what: str, *arguments: str, stdin: str = "") -> list[str]:
        done = programs.run("nft", *arguments, stdin=stdin, own=self._own)
        if "No such file or directory" in done.stderr:
            return []
        if done.returncode:
            raise ProgramFailed(programs.failure(done))
        return [f"{what} {' '.join(self._table)}"]


def parse_elements(listed: str) -> dict[str, int]:
    """Return the ports of relays by the keys of portals, from the table as nft lists it."""
    return {found[1]: int(found[2]) for found in _ELEMENT.finditer(listed)}


def find_tables(family: Family, own: OwnProcesses | None = None) -> Tables | None:
    """Return the tables of the node's iptables variant, which may not work; None if none is installed.

    Raises HostError.
    """
    try:
        return Tables(family, find_variant(), own)
    except NoVariant:
        return None


def open_portals(family: Family, at: Address | None, own: OwnProcesses | None = None) -> Portals:
    """Return the portals to relays *at* an address, None: at every one, for a program that works here.

    Its processes are remembered in *own*. Raises Unsupported if none works, SyncFailed if that is unknown,
    mostly because another program holds the xtables lock.
    """
    try:
        tables = find_tables(family, own)
        if tables is not None:
            tables.check()
            return IptablesPortals(tables)
        if not programs.find("nft"):
            raise Unsupported("neither iptables nor nft is installed; userspace.listen needs neither")
    except Unusable as error:
        if not programs.find("nft"):
            raise Unsupported(f"{family.label} cannot be redirected: {error}", family) from error
    except HostError as error:
        raise SyncFailed(str(error)) from error
    try:
        programs.output("nft", "--check", "-f", "-", stdin=nft_skeleton(family, at))
    except ProgramFailed as error:
        raise Unsupported(f"{family.label} cannot be redirected: {error}", family) from error
    return NftPortals(family, at, own)

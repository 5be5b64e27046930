"""Portals in the kernel, written by iptables, or over netlink on a machine without iptables."""

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from kproxy_core.contract import Address, Family, HostError, SyncFailed, Unsupported, family_of
from kproxy_core.linux import sysctl
from kproxy_core.linux.addresses import interface_name, read_interface_addresses, read_route
from kproxy_core.linux.errors import doing
from kproxy_core.linux.programs import OwnProcesses
from kproxy_core.linux.rulesets import ruleset
from kproxy_core.netlink.messages import NETLINK_ROUTE, attributes, decoding
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.listing import HeldTable
from kproxy_core.nft.messages import ABSENT
from kproxy_core.nft.transaction import RulesetSocket, completion
from kproxy_userspace import batch
from kproxy_userspace.names import NON_LOCAL, OUR_CHAINS, PORTAL_CHAINS, TABLE
from kproxy_userspace.settings import ROOTLESS
from kproxy_userspace.skeleton import JUMPS, nft_layout, nft_maps, nft_table, plan_cleanup
from kproxy_userspace.wanted import Redirect
from kproxy_xtables.cleanup import apply_removal
from kproxy_xtables.removal import describe, kubernetes_rules
from kproxy_xtables.rules import MANY_DELETIONS, ChainKey, missing_jumps
from kproxy_xtables.tables import Tables, Unusable
from kproxy_xtables.variant import NoVariant, find_variant

_WITH_JUMPS = {(jump.table, jump.chain) for jump in JUMPS}
_COMMENT = re.compile(r' -m comment --comment (?:"[^"]*"|\S+)')


# Bridges whose packets iptables sees while they are on a port (br_netfilter, linux/if_link.h).

_RTM_GETLINK: Final = 18
_IFINFOMSG: Final = struct.Struct("=BxHiII")
_IFLA_LINKINFO, _INFO_KIND, _INFO_DATA = 18, 1, 2
_NF_CALL: Final = {Family.IPV4: 36, Family.IPV6: 37}
"""IFLA_BR_NF_CALL_IPTABLES and IFLA_BR_NF_CALL_IP6TABLES."""
_SYSCTL: Final = {Family.IPV4: "bridge-nf-call-iptables", Family.IPV6: "bridge-nf-call-ip6tables"}


def bridged_sources(sources: Iterable[Address], family: Family) -> frozenset[Address]:
    """Return those of *sources* whose packets meet iptables while they enter a port of a bridge.

    Assumes that packets from an address arrive where the route to it leads. Raises HostError.
    """
    try:
        everywhere = sysctl.read(f"net/bridge/{_SYSCTL[family]}") != "0"
    except HostError:
        return frozenset()  # The kernel lacks br_netfilter.
    with doing("read the routes to senders"), NetlinkSocket.open(NETLINK_ROUTE) as sock:
        return frozenset(
            source for source in set(sources)
            if (device := _device(sock, source)) and _filters(sock, device, family, everywhere=everywhere)
        )  # fmt: skip


def _device(sock: NetlinkSocket, address: Address) -> int:
    """Return the index of the interface that leads to *address*; 0 without a route."""
    try:
        return read_route(sock, address).interface
    except OSError:
        return 0


def unaddressed_interface(source: Address) -> str:
    """Return the interface that leads to *source*, if it has no address of that family; "": it has.

    Raises HostError.
    """
    family = family_of(source)
    with doing("read the route to a sender"), NetlinkSocket.open(NETLINK_ROUTE) as sock:
        device = _device(sock, source)
    has_address = any(
        each.interface == device and each.family == family.af for each in read_interface_addresses())
    return "" if has_address or not device else interface_name(device)


def _filters(sock: NetlinkSocket, device: int, family: Family, *, everywhere: bool) -> bool:
    """Return whether *device* is a bridge that shows its ports' packets to iptables. Raises OSError."""
    data, start, end = sock.request_one(_RTM_GETLINK, _IFINFOMSG.pack(0, 0, device, 0, 0))
    with decoding("an interface"):
        info = attributes(attributes(data, start + _IFINFOMSG.size, end).get(_IFLA_LINKINFO, b""))
        if info.get(_INFO_KIND, b"").rstrip(b"\0") != b"bridge":
            return False
        return everywhere or attributes(info[_INFO_DATA])[_NF_CALL[family]] != b"\0"


# Portals.

After = Callable[[], Sequence[Redirect]]
"""Returns all portals as they are after a change."""


class Portals:
    """The portals of one family. This class has none: relays are bound to the ports of Services."""

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        """Replace all portals by *redirects*. Raises HostError."""

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect], after: After) -> None:
        """Delete some portals and add others. Raises HostError."""

    def differences(self, redirects: Sequence[Redirect]) -> int:
        """Return the number of missing and surplus rules or elements in the kernel. Raises HostError."""
        return 0

    def withdraw(self) -> list[str]:
        """Delete all portals and return a line for each deleted object. Raises HostError.

        Keeps one rule that needs connection tracking. Without any, the kernel would stop translating the
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

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect], after: After) -> None:
        if len(deletes) > MANY_DELETIONS:
            self._tables.restore(batch.iptables_rewrite(after(), ()))
        else:
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

    All chains of one table are created and deleted together. True for legacy programs, because they create a
    table when asked for one of its chains.
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
    """The maps of our nftables table, written over netlink."""

    def __init__(self, family: Family, at: Address | None, own: OwnProcesses | None = None) -> None:
        """*at* is the relays' address; None: every local address. Sockets are remembered in *own*."""
        self._own = own
        self._family = family
        self._at = at
        self._table = nft_table(family)

    def check(self) -> None:
        """Have the kernel check the rules, without writing them. Raises HostError."""
        objects = nft_layout(self._family, self._at).values()
        with self._connected("check") as connection:
            connection.check(list(self._table.replace(objects)))

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        with self._connected("write") as connection:
            connection.complete(
                self._table, nft_layout(self._family, self._at), batch.nft_elements(redirects))

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect], after: After) -> None:
        with self._connected("change") as connection:
            connection.run(batch.nft_change(self._family, deletes, adds))

    def differences(self, redirects: Sequence[Redirect]) -> int:
        with self._connected("read") as connection:
            held = self._held(connection)
        rules = completion(self._table, nft_layout(self._family, self._at), {}, held)
        elements = {} if held is None else held.elements
        return len(rules) + sum(
            len(wanted ^ elements.get(name, frozenset()))
            for name, wanted in batch.nft_elements(redirects).items())

    def withdraw(self) -> list[str]:
        try:
            with self._connected("empty") as connection:
                connection.run(batch.nft_empty(self._family))
        except HostError as error:
            if error.errno in ABSENT:
                return []
            raise
        return [f"portals in table {self._table.where}"]

    def held(self) -> list[Redirect]:
        """Return the portals in the kernel, whose owners are not known. Raises HostError."""
        with self._connected("read") as connection:
            found = [
                batch.parse_nft_element(container.name, self._family, element)
                for container in nft_maps(self._family)
                for element in connection.elements(self._family, TABLE, container.name)
            ]  # fmt: skip
        return [each for each in found if each is not None]

    def _held(self, connection: RulesetSocket) -> HeldTable | None:
        return connection.read(self._family, TABLE, [each.name for each in nft_maps(self._family)])

    def _connected(self, what: str) -> AbstractContextManager[RulesetSocket]:
        return ruleset(f"{what} table {self._table.where}", self._own)


def read_portals(family: Family) -> tuple[dict[ChainKey, list[str]], list[Redirect]]:
    """Return the rules of the nat table if iptables wrote the portals, else the redirects in our nftables
    table.

    Raises HostError.
    """
    tables = find_tables(family)
    if tables is not None and may_have_portals(tables):
        return tables.chains("nat"), []
    return {}, NftPortals(family, None).held()


def find_tables(family: Family, own: OwnProcesses | None = None) -> Tables | None:
    """Return the tables of the node's iptables variant, which may not work; None if none is installed.

    Raises HostError.
    """
    try:
        return Tables(family, find_variant(), own)
    except NoVariant:
        return None


def open_portals(family: Family, at: Address | None, own: OwnProcesses | None = None) -> Portals:
    """Return the portals to relays *at* an address (None: every one), by iptables or else over netlink.

    *own* gets its processes. Raises Unsupported if neither works, SyncFailed if that is unknown, mostly
    because another program holds the xtables lock.
    """
    problems = []
    try:
        tables = find_tables(family, own)
        if tables is not None:
            tables.check()
            tables.check_foreign_rules()
            return IptablesPortals(tables)
    except Unusable as error:
        problems.append(str(error))
    except HostError as error:
        raise SyncFailed(str(error)) from error
    portals = NftPortals(family, at, own)
    try:
        portals.check()
    except HostError as error:
        because = "; ".join([*problems, str(error)])
        raise Unsupported(
            f"{family.label} cannot be redirected: {because}; run as root or with CAP_NET_ADMIN, {ROOTLESS}",
            family) from error
    return portals

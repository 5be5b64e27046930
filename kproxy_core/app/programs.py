"""Programs that write rules, told by the names of their tables and chains, and what to do about the rules."""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from kproxy_core.nft.packet import Place

ChainNames = Callable[[str, str], frozenset[str]]
"""Returns the names of the chains of a table, by family and name. Raises OSError."""

REMEDY: Final = "accept packets from and to the pods' networks before this rule"
REMEDY_OF_TRANSLATION: Final = (
    "remove what that rule is for, such as a hostPort that is a node port, too; `kproxy explain` follows "
    "single packets")


class Program(NamedTuple):
    name: str
    remedy: str = REMEDY
    tables: tuple[str, ...] = ()
    chains: tuple[str, ...] = ()
    """Beginnings of names. A policy is theirs if its table has such a chain."""


_PROGRAMS: Final = (
    Program(
        "firewalld", "put the pods' networks into a zone that accepts: firewall-cmd --permanent "
        "--zone=trusted --add-source=NETWORK && firewall-cmd --reload",
        tables=("firewalld",), chains=("FWD_",)),
    Program(
        "ufw", "ufw default allow routed, or ufw route allow from NETWORK and ufw route allow to NETWORK",
        chains=("ufw-", "ufw6-")),
    Program(
        "Docker", "accept the pods' networks: iptables -I DOCKER-USER -s NETWORK -j ACCEPT, and the same "
        "with -d; Docker leaves the policy alone if net.ipv4.ip_forward is 1 before it starts",
        tables=("docker-bridges",), chains=("DOCKER",)),
    Program("Calico", "look at the network policies of the sender and of the endpoint",
            tables=("calico",), chains=("cali-",)),
    Program("kube-router", "look at the network policies of the sender and of the endpoint",
            chains=("KUBE-ROUTER-", "KUBE-POD-FW-", "KUBE-NWPLCY-")),
    Program("Cilium", "look at the network policies of the sender and of the endpoint", chains=("CILIUM_",)),
    Program("fail2ban", "fail2ban-client unban ADDRESS, or ignoreip = NETWORK in its jail",
            tables=("f2b-table",), chains=("f2b-",)),
    Program("CNI portmap", REMEDY_OF_TRANSLATION, tables=("cni_hostport",), chains=("CNI-",)),
    Program("Podman", REMEDY_OF_TRANSLATION, tables=("netavark",), chains=("NETAVARK",)),
    Program("libvirt", tables=("libvirt_network",), chains=("LIBVIRT_",)),
)


def program_of(place: Place, chain_names: ChainNames) -> Program | None:
    """Return the program that wrote a rule or a policy; None if its names tell none. Raises OSError."""
    for program in _PROGRAMS:
        if place.table in program.tables:
            return program
    names = {place.chain} if place.rule is not None else chain_names(place.family, place.table)
    return next(
        (program for program in _PROGRAMS if any(name.startswith(program.chains) for name in names)), None)


# Service proxies: kproxy and kube-proxy.

TRANSLATING_TABLES: Final = ("kproxy", "kube-proxy")
"""Those of nf_tables that translate; others of kproxy's reset connections, for example, in all modes."""
_ENTRIES: Final = (
    "SERVICES|EXTERNAL-SERVICES|NODEPORTS|NODE-PORT|NODEPORT-NON-LOCAL|PROXY-FIREWALL|"
    "SOURCE-RANGES-FIREWALL|POSTROUTING|(PORTALS|NODEPORT)-(CONTAINER|HOST)|"
    "[A-Z]+-(FILTER|OUT-FILTER|ACCESS|SHORT-CIRCUIT)")
_ENTRY: Final = re.compile(f"KUBE-({_ENTRIES})")
"""Chains to which the tables of iptables lead. KUBE-FORWARD is not among them: it accepts packets before
others drop them."""
_CHAIN: Final = re.compile(
    f"KUBE-({_ENTRIES}|FORWARD|MARK-.*|S(VC|VL|EP)-.*|EXT-.*|FW-.*|XLB-.*|FIREWALL|LOAD-BALANCER)")


def is_table_of_service_proxy(name: str) -> bool:
    return name in TRANSLATING_TABLES or name.startswith("kproxy-")


def is_not_service_chain(name: str) -> bool:
    """Return whether a chain is none in which the rules of a service proxy begin."""
    return _ENTRY.fullmatch(name) is None


def is_chain_of_service_proxy(name: str) -> bool:
    return _CHAIN.fullmatch(name) is not None


def is_of_service_proxy(place: Place) -> bool:
    """Return whether a rule is one of kproxy's or kube-proxy's."""
    return is_table_of_service_proxy(place.table) or is_chain_of_service_proxy(place.chain)

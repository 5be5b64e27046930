"""Programs that write rules, told by the names of their tables and chains, and what to do about the rules."""

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

"""Rules of other programs on a node, in the form in which they write them, about a random part of a site.

The directory ``rules`` has a file for each, for ``nft -f`` or for ``iptables-restore --noflush``. The words
in braces stand for random values.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from kproxy_core.model.address import Family
from tests.core.nft.random_rules import Site, iptables_rules, nft_rules


class Rules(NamedTuple):
    """Input for ``nft -f`` and for ``iptables-restore --noflush``; one of them is empty."""

    nft: str = ""
    iptables: str = ""


Make = Callable[[Random, Family, Site], Rules]


def _words(random: Random, family: Family, site: Site) -> Mapping[str, str]:
    server, other = random.sample(site.servers[:2], 2)
    return {
        "ip": family.ip,
        "key": "ipv4_addr" if family is Family.IPV4 else "ipv6_addr",
        "nfproto": "ipv4" if family is Family.IPV4 else "ipv6",
        "vip": random.choice(site.servers[2:]),
        "server": server,
        "server_socket": f"{server}:" if family is Family.IPV4 else f"[{server}]:",
        "other": other,
        "client": random.choice(site.clients),
        "network": random.choice(site.networks),
        "device": random.choice(site.devices),
        "pod_device": random.choice(("kcbr0", "kcveth2")),
        "proto": random.choice(("tcp", "udp")),
        "port": str(random.choice(site.ports)),
        "endpoint_port": random.choice(("8080", "8081", "8082")),
    }


def _from_file(path: Path, random: Random, family: Family, site: Site) -> Rules:
    text = path.read_text(encoding="utf-8")
    for word, value in _words(random, family, site).items():
        text = text.replace(f"{{{word}}}", value)
    return Rules(nft=text) if path.suffix == ".nft" else Rules(iptables=text)


def _random_nft(random: Random, family: Family, site: Site) -> Rules:
    return Rules(nft=nft_rules(random, family, is_certain=random.random() < 0.8, site=site))


def _random_iptables(random: Random, family: Family, site: Site) -> Rules:
    return Rules(iptables=iptables_rules(random, family, is_certain=random.random() < 0.8, site=site))


NEIGHBOURS: Final[Mapping[str, Make]] = {
    **{path.name: partial(_from_file, path) for path in sorted((Path(__file__).parent / "rules").iterdir())},
    "random rules of nft": _random_nft, "random rules of iptables": _random_iptables,
}

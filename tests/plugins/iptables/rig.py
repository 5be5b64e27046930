"""Family states for tests, and the programs to inspect the tables."""

import subprocess

from kproxy_core.model.address import Family
from kproxy_iptables.family import FamilyState
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import Variant, find_variants
from tests import rights

V4, V6 = Family.IPV4, Family.IPV6

NFT, LEGACY = "nf_tables", "legacy"
INTERFACES = (NFT, LEGACY)


def variant(interface: str) -> Variant:
    """Return the programs for nf_tables, or the legacy ones. Raises MissingRight."""
    rights.program("iptables-nft" if interface == NFT else "iptables-legacy")
    return next(found for found in find_variants() if found.nft is (interface == NFT))


def kernel(interface: str, family: Family = V4) -> Tables:
    """Return one family's tables in the current network namespace."""
    return Tables(family, variant(interface))


def family_state(interface: str, family: Family = V4) -> FamilyState:
    """Return a new state for one family."""
    return FamilyState(kernel(interface, family), localhost_node_ports=True)


def run(interface: str, *arguments: str, family: Family = V4, stdin: str = "") -> str:
    """Run iptables and return its output. The first of *arguments* may be ``save`` or ``restore``."""
    action = arguments[0] if arguments[0] in ("save", "restore") else ""
    program = variant(interface).program(family, action)
    done = subprocess.run(
        [program, *arguments[1 if action else 0 :]], input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{program} {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def rules(interface: str, table: str, chain: str, family: Family = V4) -> list[str]:
    """Return the rules of a chain without ``-A CHAIN``."""
    listed = run(interface, "-t", table, "-S", chain, family=family).splitlines()
    return [line.removeprefix(f"-A {chain} ") for line in listed if line.startswith("-A ")]

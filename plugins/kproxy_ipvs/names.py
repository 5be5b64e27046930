"""Names of sets, chains, the device and marks; kube-proxy's where it has them (1.36, pkg/proxy/ipvs)."""

from itertools import chain
from typing import NamedTuple

from kproxy_core.contract import Family, Protocol

DEVICE = "kube-ipvs0"
"""The dummy interface that holds the addresses of all Services, which makes packets to them local."""

LONGEST_SET_NAME = 31
"""IPSET_MAXNAMELEN of linux/netfilter/ipset/ip_set.h, without the final zero."""

NAT, FILTER, MANGLE = "nat", "filter", "mangle"

SERVICES = "KUBE-SERVICES"
POSTROUTING = "KUBE-POSTROUTING"
NODE_PORT = "KUBE-NODE-PORT"
LOAD_BALANCER = "KUBE-LOAD-BALANCER"
MARK_MASQ = "KUBE-MARK-MASQ"
FORWARD = "KUBE-FORWARD"
IPVS_FILTER = "KUBE-IPVS-FILTER"
IPVS_ACCESS = "KUBE-IPVS-ACCESS"
SOURCE_RANGES = "KUBE-SOURCE-RANGES-FIREWALL"
SHORT_CIRCUITS = "KUBE-IPVS-SHORT-CIRCUIT"


MOST_ENTRIES = 1 << 24
"""Limit for the entries of a set. kube-proxy's 65,536 are fewer than what Services may have."""


class SetKind(NamedTuple):
    """An ipset that exists once per family."""

    name: str
    """The name without the prefix of the family."""
    type: str
    marks: bool = False
    """Entries carry a mark."""

    @property
    def sides(self) -> str:
        """The parts of a packet that entries are compared with."""
        return "dst" if self.type == "bitmap:port" else "dst,dst"

    def full_name(self, family: Family) -> str:
        prefix = "KUBE-" if family is Family.IPV4 else "KUBE-6-"
        return (prefix + self.name)[:LONGEST_SET_NAME]

    def create(self, family: Family) -> str:
        if self.type == "bitmap:port":
            return f"{self.full_name(family)} {self.type} range 0-65535"
        inet = "inet" if family is Family.IPV4 else "inet6"
        marks = " skbinfo" if self.marks else ""
        return (f"{self.full_name(family)} {self.type} family {inet} hashsize 1024 maxelem {MOST_ENTRIES}"
                f"{marks}")


_IP_PORT, _PORT = "hash:ip,port", "bitmap:port"

LOOP_BACK = SetKind("LOOP-BACK", "hash:ip,port,ip")
CLUSTER_IP = SetKind("CLUSTER-IP", _IP_PORT)
EXTERNAL_IP = SetKind("EXTERNAL-IP", _IP_PORT)
EXTERNAL_IP_LOCAL = SetKind("EXTERNAL-IP-LOCAL", _IP_PORT)
LOAD_BALANCER_SET = SetKind("LOAD-BALANCER", _IP_PORT)
LOAD_BALANCER_LOCAL = SetKind("LOAD-BALANCER-LOCAL", _IP_PORT)
LOAD_BALANCER_FW = SetKind("LOAD-BALANCER-FW", _IP_PORT)
SOURCE_CIDR = SetKind("LOAD-BALANCER-SOURCE-CIDR", "hash:ip,port,net")
SOURCE_IP = SetKind("LOAD-BALANCER-SOURCE-IP", "hash:ip,port,ip")
HEALTH_CHECK = SetKind("HEALTH-CHECK-NODE-PORT", _PORT)
IPVS_IPS = SetKind("IPVS-IPS", "hash:ip")
SHORT_CIRCUIT = SetKind("SHORT-CIRCUIT", _IP_PORT, marks=True)
NO_LOCAL = SetKind("NO-LOCAL-ENDPOINT", _IP_PORT)

NODE_PORT_SETS = {
    # protocol: (all node ports, node ports with policy Local)
    Protocol.TCP: (SetKind("NODE-PORT-TCP", _PORT), SetKind("NODE-PORT-LOCAL-TCP", _PORT)),
    Protocol.UDP: (SetKind("NODE-PORT-UDP", _PORT), SetKind("NODE-PORT-LOCAL-UDP", _PORT)),
    Protocol.SCTP: (
        SetKind("NODE-PORT-SCTP-HASH", _IP_PORT), SetKind("NODE-PORT-LOCAL-SCTP-HASH", _IP_PORT)),
}  # fmt: skip

SETS = (
    LOOP_BACK, CLUSTER_IP, EXTERNAL_IP, EXTERNAL_IP_LOCAL, LOAD_BALANCER_SET, LOAD_BALANCER_LOCAL,
    LOAD_BALANCER_FW, SOURCE_CIDR, SOURCE_IP, *chain(*NODE_PORT_SETS.values()), HEALTH_CHECK, IPVS_IPS,
    SHORT_CIRCUIT, NO_LOCAL,
)  # fmt: skip

OLDER_SETS = (
    SetKind("LOAD-BALANCER-MASQ", _IP_PORT),
    SetKind("NODE-PORT-SCTP", _PORT),
    SetKind("NODE-PORT-LOCAL-SCTP", _PORT),
)
"""Sets of kube-proxy up to 1.9 (the first) and up to 1.14."""

REPLACEMENT = SetKind("REPLACEMENT", _IP_PORT)
"""A set of any type that is about to replace another one."""

_MARK_PREFIX = 0x6B000000
_MARK_BITS = 0x00FFFFFF


def mark(number: int, masquerade_bit: int) -> int:
    """Return the mark for *number*. It has this mode's prefix and never the masquerade bit."""
    low = number & _MARK_BITS
    if masquerade_bit < 24:
        low &= ~(1 << masquerade_bit)
    return (_MARK_PREFIX & ~(1 << masquerade_bit)) | low


def is_own_mark(value: int, masquerade_bit: int) -> bool:
    return mark(value, masquerade_bit) == value

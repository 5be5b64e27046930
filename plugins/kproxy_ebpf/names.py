"""Names of the mode, its maps and programs, and the types of the programs (linux/bpf.h)."""

MODE = "ebpf"

FRONTENDS = "frontends"
SLOTS = "slots"
ENDPOINTS = "endpoints"
NODE_ADDRESSES = "node_addresses"
OWN_ADDRESSES = "own_addresses"
PINS = "pins"
PINNED = "pinned"
HAIRPINS = "hairpins"
SENDERS = "senders"
SETTINGS = "settings"
CONNECTED = "connected"
CONNECTIONS = "connections"
FLOWS = "kept"
PEERS = "peer"

MAPS = (
    FRONTENDS, SLOTS, ENDPOINTS, NODE_ADDRESSES, OWN_ADDRESSES, PINS, PINNED, HAIRPINS, SENDERS, SETTINGS,
    CONNECTED, CONNECTIONS, FLOWS, PEERS,
)  # fmt: skip

OF_NODE = (NODE_ADDRESSES, OWN_ADDRESSES)
"""Maps whose elements depend on the node alone."""
PER_FAMILY = (FRONTENDS, SLOTS, ENDPOINTS, *OF_NODE)
"""Maps whose elements depend on Services and the node."""

ON_THE_WAY_OUT = ("connect4", "connect6", "sendmsg4", "sendmsg6")
"""Programs that choose endpoints."""
ON_THE_WAY_BACK = ("recvmsg4", "recvmsg6", "getpeername4", "getpeername6")
"""Programs that restore the dialled address."""
PROGRAMS = ON_THE_WAY_BACK + ON_THE_WAY_OUT
"""In the order of attachment: a reply is translated before a first request is."""
RELEASE = "release"
"""The program that forgets connected UDP sockets, attached only where those are translated."""
OUTCOMES = "outcomes"
"""The program that counts failures and handshakes, attached only where connections are counted."""
ON_PACKETS = ("egress", "ingress")
"""The programs that count packets and bytes, attached only where connection tracking does, too."""
COUNTING = (OUTCOMES, *ON_PACKETS)

PROGRAM_TYPE = 18
"""BPF_PROG_TYPE_CGROUP_SOCK_ADDR"""
ATTACH_TYPES = {
    "connect4": 10, "connect6": 11, "sendmsg4": 14, "sendmsg6": 15, "recvmsg4": 19, "recvmsg6": 20,
    "getpeername4": 29, "getpeername6": 30,
}  # fmt: skip
"""enum bpf_attach_type of the programs that translate."""

KINDS = {
    **{name: (PROGRAM_TYPE, attach_type) for name, attach_type in ATTACH_TYPES.items()},
    RELEASE: (9, 34), OUTCOMES: (13, 3), "egress": (8, 1), "ingress": (8, 0),
}  # fmt: skip
"""Type and attach type of all programs; BPF_PROG_TYPE_CGROUP_SOCK, and of those that count _SOCK_OPS and
_CGROUP_SKB."""


NOTRACK_TABLE = "kproxy-notrack"
"""The table of each IP family in which kproxy 0.2 exempted connections from tracking (option ``notrack``)."""

OBJECT_PREFIX = "kproxy_"
"""Prefix of the names of programs and maps in the kernel's lists."""

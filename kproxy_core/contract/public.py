"""The modules beside the contract from which a plugin may import, with the names that it may use.

`values.CONTRACT` is the version of these names, too: `kproxy_core.contract.__all__`, and this list. A test
compares it with the imports of all plugins, and ``make surface COMPARE=REV`` with an earlier one.
docs/writing-a-backend.md prints it.
"""

from collections.abc import Mapping

PUBLIC: Mapping[str, tuple[str, ...]] = {
    "kproxy_core.contract.caveats": (
        "of_loopback", "of_node_ports", "of_removed_endpoints", "of_unclaimed_ports", "sorted_plans",
    ),
    "kproxy_core.linux.addresses": (
        "IFADDRMSG", "IFA_ADDRESS", "IFA_LOCAL", "RTM_DELADDR", "RTM_NEWADDR", "RTNLGRP_IPV4_IFADDR",
        "RTNLGRP_IPV6_IFADDR", "RTNLGRP_LINK", "decode_interface_address", "default_source_address",
        "interface_name", "node_addresses", "read_interface_addresses", "read_route",
    ),
    "kproxy_core.linux.conntrack": (
        "UNREPLIED", "TrackedFlow", "UdpFlow", "accounting_enabled", "answered_by", "delete_stale_udp",
        "dump_flows", "progress_of", "read_udp_flows",
    ),
    "kproxy_core.linux.errors": ("doing",),
    "kproxy_core.linux.libnftables": ("complaint", "list_table"),
    "kproxy_core.linux.modules": ("Modules", "kernel_version"),
    "kproxy_core.linux.namespaces": ("in_network_namespaces",),
    "kproxy_core.linux.packages": ("installing", "interpreters", "is_installed", "lacking", "remedy"),
    "kproxy_core.linux.process": ("cpu_seconds", "held", "network_privileges"),
    "kproxy_core.linux.programs": (
        "Done", "OwnProcesses", "ProgramFailed", "ProgramUnfinished", "complaint", "failure", "find",
        "lines", "output", "run",
    ),
    "kproxy_core.linux.relay.counts": ("GAUGES", "Counter"),
    "kproxy_core.linux.relay.orders": ("Count", "Endpoint", "Serve", "WorkerSettings"),
    "kproxy_core.linux.relay.pool": ("Worker", "WorkerPool"),
    "kproxy_core.linux.rulesets": (
        "KUBE_PROXY_TABLE", "MARKER", "chain_exists", "has_kube_proxy", "has_marker", "is_recent",
        "marker_changes", "marker_creation", "ruleset", "table_exists",
    ),
    "kproxy_core.linux.sockets": (
        "UdpSocket", "connected_udp_sockets", "destroy_tcp_sockets", "destroy_udp_sockets", "peer_of",
        "udp_destruction_problem",
    ),
    "kproxy_core.linux.sysctl": ("ensure", "read"),
    "kproxy_core.linux.trial": ("FeatureProbe", "problem_of", "sysctl_finding"),
    "kproxy_core.netlink.messages": (
        "NETLINK_GENERIC", "NETLINK_NETFILTER", "NETLINK_ROUTE", "NETLINK_SOCK_DIAG", "NFGENMSG",
        "NLA_F_NESTED", "NLA_F_NET_BYTEORDER", "NLM_F_CREATE", "NLM_F_EXCL", "NLM_F_REPLACE",
        "SOCK_DIAG_BY_FAMILY", "NetlinkRequest", "Span", "TooLong", "attribute", "attribute_spans",
        "attributes", "decoding", "fitting", "messages", "nested", "text", "text_attribute",
    ),
    "kproxy_core.netlink.sockets": ("NetlinkSocket", "NotificationThread", "RequestError"),
    "kproxy_core.nft.alike": ("Example", "Names", "NoLike", "compared_with"),
    "kproxy_core.nft.elements": ("Data", "Element", "Found", "PlainElement", "element_texts"),
    "kproxy_core.nft.expressions": (
        "CERTAIN", "HOOKS", "BaseChain", "Branch", "HeldSet", "Looked", "Part", "Prepared", "Ruleset",
        "prepare",
    ),
    "kproxy_core.nft.fake": ("BATCH_BEGIN", "FakeKernel"),
    "kproxy_core.nft.interpret": ("End", "Fate", "Limits", "Program", "Result", "Way", "is_translated"),
    "kproxy_core.nft.listing": ("HeldTable",),
    "kproxy_core.nft.messages": ("ABSENT", "Command", "commands_text", "transaction"),
    "kproxy_core.nft.objects": (
        "DORMANT", "OWNER", "PERSIST", "Chain", "Container", "Flowtable", "Hook", "Layout", "Leftover",
        "Object", "Table",
    ),
    "kproxy_core.nft.packet": (
        "LOOPBACK", "NO_INTERFACE", "RTN_LOCAL", "RTN_UNICAST", "Answer", "Depends", "Flow", "Interface",
        "Node", "Number", "Packet", "Place", "Route", "Seen", "Share", "Status", "Translation", "translated",
    ),
    "kproxy_core.nft.rules": (
        "ADDRESS", "DESTINATION_PORT", "DESTINATION_PORT_OF", "DROP", "INPUT_INTERFACE", "INTEGER",
        "L4_PROTOCOL", "MASQUERADE", "NFT_CONTINUE", "NFT_GOTO", "NFT_JUMP", "NFT_RETURN", "NF_ACCEPT",
        "NF_DROP", "ORIGINAL_PORT", "PORT", "PROTOCOL", "RESET", "SOURCE_PORT_OF", "VERDICT", "DataType",
        "Field", "HeldRule", "Key", "Rule", "Statement", "Verdict", "among", "count", "ct_state", "ct_status",
        "destination_address", "differs", "dnat_to_address", "dnat_to_endpoint", "dnat_to_port", "equals",
        "flip_mark", "goto", "has_mark", "hashed", "is_local", "jump", "offload", "original_destination",
        "original_source", "random_number", "redirect_to_port", "reject", "rule_text", "set_mark",
        "source_address", "update", "vmap",
    ),
    "kproxy_core.nft.ruleset": ("ListedRuleset", "TableRuleset", "WrittenRuleset"),
    "kproxy_core.nft.transaction": (
        "MOST_ELEMENTS", "Replacement", "RulesetSocket", "TransactionRefused", "Writer", "completion",
        "constants", "count_changes", "difference", "element_changes", "is_quotable", "replacement",
        "unwanted",
    ),
    "kproxy_core.nft.watch": ("Change", "ChangeKind", "Commit", "CommitWatch", "generation"),
    "kproxy_core.nft.xt": (
        "WITHOUT_EFFECT", "Effect", "Sight", "Target", "Test", "Unreadable", "address_type", "changed_mark",
        "negated", "redirected", "to_interface",
    ),
}

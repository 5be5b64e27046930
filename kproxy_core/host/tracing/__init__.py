"""Traces of packets through nf_tables' rules, iptables-nft's included (linux/netfilter/nf_tables.h)."""

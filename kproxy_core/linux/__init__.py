"""The node as all backends share it: netlink, nf_tables, conntrack, programs, files. Knows no backend."""

"""iptables programs and tables, shared by all backends that write iptables rules. Knows none of them."""

"""The iptables tables and programs, for the backends that write iptables rules."""

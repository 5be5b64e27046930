"""Operations encoded for the kernel: netlink messages and iptables-restore text. Pure."""

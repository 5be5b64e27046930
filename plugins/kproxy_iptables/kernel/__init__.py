"""What the iptables mode reads and writes in the kernel, besides its rules."""

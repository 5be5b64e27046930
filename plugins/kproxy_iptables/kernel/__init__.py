"""Access to the kernel: tables through kproxy_xtables, accounting objects and sysctls. Decides nothing."""

"""Portals, ports and connection tracking: the userspace mode's input and output in the proxy."""

"""Netlink: messages and sockets. Knows nothing of what they are about."""

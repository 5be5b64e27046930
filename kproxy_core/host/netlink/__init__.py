"""Netlink messages, sockets and watches."""

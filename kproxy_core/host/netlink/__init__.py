"""Netlink: messages, sockets, watches, interface addresses. Nothing that only one backend needs."""

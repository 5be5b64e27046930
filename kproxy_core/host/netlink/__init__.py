"""Netlink: messages as bytes, sockets, watches, and interface addresses. No meaning of any one backend."""

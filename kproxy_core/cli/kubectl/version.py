"""``kubectl kproxy version``: the version of this program, not those of the nodes."""

from kproxy_core.cli.version import command as command

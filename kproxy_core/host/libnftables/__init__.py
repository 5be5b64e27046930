"""Text of nf_tables, read and checked by libnftables in a child process, which it may crash.

libnftables ends its process by SIGSEGV at sets that a newer release made: those of any program on the node.
"""

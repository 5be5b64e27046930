"""The sync loop: one thread that plans changes and hands them to the backend.

It knows its observers by an interface only, and does no I/O except to delete conntrack entries.
"""

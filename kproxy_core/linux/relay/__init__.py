"""Relays: processes that accept, dial and copy, and their pool. A worker imports only what it needs."""

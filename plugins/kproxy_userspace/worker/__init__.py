"""The relay worker: a process of its own that accepts, dials and copies."""

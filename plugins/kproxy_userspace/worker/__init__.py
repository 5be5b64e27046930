"""The relay worker: a process that accepts, dials and copies. It must not import what it does not need."""

"""The relay worker: a process that accepts, dials and copies. It imports only the modules it needs."""

"""The API server as a source of events: list, watch, resume."""

"""The contract of backends: hooks, values, errors and the registry of plugins."""

"""The kernel's connection tracking: its table, stale flows and settings."""

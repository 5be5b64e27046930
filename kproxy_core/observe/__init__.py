"""Metrics, health, logs and cluster events, for operators. Nothing here decides about packets."""

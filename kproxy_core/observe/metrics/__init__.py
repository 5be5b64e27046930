"""Metrics, counted and exposed with prometheus_client. Records only: nothing here decides."""

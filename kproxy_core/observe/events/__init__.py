"""Cluster events that report problems of this proxy."""

"""Requests to a Kubernetes API server. Knows nothing of lists, watches or the store."""

"""Requests to a Kubernetes API server over urllib3. Knows nothing of lists, watches or the store."""

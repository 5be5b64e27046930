"""Kubernetes objects: on the wire, from an API server or a directory, and folded into one state."""

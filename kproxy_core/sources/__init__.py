"""The sources of objects: the API server, or a directory of manifests. No planning, no kernel."""

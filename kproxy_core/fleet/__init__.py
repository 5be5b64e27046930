"""All nodes of a cluster, from afar: their kproxy pods are found and asked through the API server."""

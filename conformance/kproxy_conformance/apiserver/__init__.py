"""A static Kubernetes API server, which feeds proxies in tests and measurements."""

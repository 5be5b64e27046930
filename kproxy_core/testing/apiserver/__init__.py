"""A static Kubernetes API server: what tests and measurements feed a proxy from."""

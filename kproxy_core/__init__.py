"""kproxy: a Kubernetes service proxy as a framework of backend plugins."""

__version__ = "0.2.0"

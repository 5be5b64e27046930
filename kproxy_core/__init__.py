"""kproxy: a Kubernetes service proxy as a framework of backend plugins."""

from kproxy_core.config.release import version

__version__ = version()

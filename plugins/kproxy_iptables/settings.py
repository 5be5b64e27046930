"""What the ``iptables`` section of the configuration file says."""

from typing import NamedTuple

from kproxy_core.backend.api import BackendSettings


class Settings(NamedTuple):
    """The settings of this mode that are not the core's business."""

    localhost_node_ports: bool
    """Serve node ports on 127.0.0.0/8 too, as far as loopback serves node ports at all."""
    canary_period: float
    """Seconds between two looks at the canaries."""


def read_settings(settings: BackendSettings) -> Settings:
    """``localhostNodePorts`` and ``syncPeriod``, by default true and 30 seconds."""
    period = settings.options.get("syncPeriod")
    return Settings(
        settings.options.get("localhostNodePorts", True) is not False,
        float(period) if isinstance(period, int | float) and period > 0 else 30.0,
    )

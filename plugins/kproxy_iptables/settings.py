"""What the ``iptables`` section of the configuration file says."""

from typing import NamedTuple

from kproxy_core.backend.api import BackendSettings
from kproxy_core.model.address import Family


class Settings(NamedTuple):
    """The settings of this mode that are not the core's business."""

    localhost_node_ports: bool
    """Serve node ports on 127.0.0.0/8 too."""
    canary_period: float
    """Seconds between two looks at the canaries."""


def read_settings(settings: BackendSettings) -> Settings:
    """``localhostNodePorts``, where loopback serves node ports at all, and ``syncPeriod``.

    By default true and 30 seconds.
    """
    period = settings.options.get("syncPeriod")
    on_loopback = Family.IPV4 in settings.families and Family.IPV4 in settings.loopback_node_ports
    return Settings(
        on_loopback and settings.options.get("localhostNodePorts", True) is not False,
        float(period) if isinstance(period, int | float) and period > 0 else 30.0,
    )

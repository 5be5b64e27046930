"""The ``iptables`` section of the configuration file."""

from typing import NamedTuple

from kproxy_core.contract import BackendSettings, Family


class Settings(NamedTuple):
    localhost_node_ports: bool
    """Serve node ports on 127.0.0.0/8 too."""
    canary_period: float
    """Interval in seconds between checks of the canaries."""


def read_settings(settings: BackendSettings) -> Settings:
    """Read ``localhostNodePorts``, by default true, and ``syncPeriod``, by default 30 seconds.

    The first is false if no node ports are served on loopback at all.
    """
    period = settings.options.get("syncPeriod")
    on_loopback = Family.IPV4 in settings.families and Family.IPV4 in settings.loopback_node_ports
    return Settings(
        on_loopback and settings.options.get("localhostNodePorts", True) is not False,
        float(period) if isinstance(period, int | float) and period > 0 else 30.0,
    )

"""The options of the mode, under ``kproxy.backendOptions.nftables`` of the configuration file."""

from collections.abc import Collection
from typing import NamedTuple, Self

from kproxy_core.contract import BackendSettings, InvalidOption, is_interface_name

FLOWTABLE = "kproxy.backendOptions.nftables.flowtable"


class Settings(NamedTuple):
    """Optional rules."""

    counted: bool = False
    """Count new connections."""
    flowtable: tuple[str, ...] = ()
    """Devices between which established flows bypass the rules; empty: no flowtable."""
    without_hash: bool = False
    """The kernel has no ``jhash``: endpoints are chosen at random instead."""
    marked: bool = False
    """Keep a chain in kube-proxy's table (`rulesets.MARKER`)."""

    def limited_to(self, present: Collection[str]) -> Self:
        """Return the settings without devices that are not *present*: the kernel refuses those."""
        return self._replace(flowtable=tuple(device for device in self.flowtable if device in present))


DEFAULTS = Settings()


def read_settings(settings: BackendSettings) -> Settings:
    """Return the options in effect. Raises InvalidOption."""
    devices = settings.options.get("flowtable") or []
    if not isinstance(devices, list):
        raise InvalidOption(settings, "flowtable", devices, "must be a list of network devices")
    for device in devices:
        if not isinstance(device, str) or not is_interface_name(device):
            raise InvalidOption(settings, "flowtable", device, "must be the name of a network device")
    marked = settings.options.get("calicoMarker") or False
    if not isinstance(marked, bool):
        raise InvalidOption(settings, "calicoMarker", marked, "must be true or false")
    return Settings(settings.count_traffic, tuple(dict.fromkeys(devices)), marked=marked)

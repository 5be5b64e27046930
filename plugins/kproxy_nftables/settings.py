"""The options of the mode, under ``kproxy.backendOptions.nftables`` of the configuration file."""

from kproxy_core.contract import BackendSettings, InvalidOption
from kproxy_core.model.node import is_interface_name
from kproxy_nftables.skeleton import Extras

FLOWTABLE = "kproxy.backendOptions.nftables.flowtable"


def read_settings(settings: BackendSettings) -> Extras:
    """Return the options in effect. Raises InvalidOption."""
    devices = settings.options.get("flowtable") or []
    if not isinstance(devices, list):
        raise InvalidOption(settings, "flowtable", devices, "must be a list of network devices")
    for device in devices:
        if not isinstance(device, str) or not is_interface_name(device):
            raise InvalidOption(settings, "flowtable", device, "must be the name of a network device")
    return Extras(settings.count_traffic, tuple(dict.fromkeys(devices)))

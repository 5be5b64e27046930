"""The options of the mode, under ``kproxy.backendOptions.nftables`` of the configuration file."""

import re

from kproxy_core.backend.api import BackendSettings
from kproxy_core.backend.errors import Unsupported
from kproxy_nftables.skeleton import Extras

FLOWTABLE = "kproxy.backendOptions.nftables.flowtable"

_DEVICE = re.compile(r"""(?:(?![/:*"\\])[!-~]){1,15}""")
"""Names of devices (linux/if.h), without characters that are special to nft."""


def read_settings(settings: BackendSettings) -> Extras:
    """Return the options in effect. Raises Unsupported naming an option with a wrong value."""
    devices = settings.options.get("flowtable") or []
    if not isinstance(devices, list):
        raise _wrong(devices, "must be a list of network devices")
    for device in devices:
        if not isinstance(device, str) or not _DEVICE.fullmatch(device):
            raise _wrong(device, "must be the name of a network device")
    return Extras(settings.count_traffic, tuple(dict.fromkeys(devices)))


def _wrong(value: object, problem: str) -> Unsupported:
    return Unsupported(f"nftables.flowtable: {value!r}: {problem}")

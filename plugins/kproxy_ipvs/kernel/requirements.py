"""The kernel modules and sysctls of the ipvs mode."""

import logging
from pathlib import Path

from kproxy_core.contract import HostError
from kproxy_core.linux import programs, sysctl
from kproxy_core.linux.modules import kernel_version
from kproxy_ipvs.settings import Settings
from kproxy_ipvs.wanted import schedulers

log = logging.getLogger("kproxy.ipvs")

_REUSE_MODE_MATTERS = ((4, 1), (5, 9))
"""Linux releases between which conn_reuse_mode 1 delays connections (kubernetes#81775)."""


def load_modules(configured: str) -> None:
    """Load the modules of IPVS for the *configured* scheduler. Raises HostError.

    A kernel with IPVS built in needs none.
    """
    wanted = ["ip_vs", *(f"ip_vs_{name}" for name in schedulers(configured))]
    missing = [name for name in wanted if not Path("/sys/module", name).is_dir()]
    if missing and programs.find("modprobe"):
        programs.run("modprobe", "-qa", *missing)


def ensure_settings(settings: Settings) -> None:
    """Set the sysctls of kube-proxy's ipvs mode (1.36, pkg/proxy/ipvs/proxier.go). Raises HostError."""
    wanted = {
        "net/ipv4/vs/conntrack": 1,
        "net/ipv4/vs/expire_nodest_conn": 1,
        "net/ipv4/vs/expire_quiescent_template": 1,
        "net/ipv4/ip_forward": 1,
    }
    first, fixed = _REUSE_MODE_MATTERS
    if first <= kernel_version() < fixed:
        wanted["net/ipv4/vs/conn_reuse_mode"] = 0
    if settings.strict_arp:
        wanted |= {"net/ipv4/conf/all/arp_ignore": 1, "net/ipv4/conf/all/arp_announce": 2}
    for name, value in wanted.items():
        try:
            if sysctl.ensure(name, value):
                log.info("sysctl changed", extra={"fields": {"name": name, "value": value}})
        except HostError as error:
            raise HostError(f"ipvs mode needs {name} = {value}: {error}") from error

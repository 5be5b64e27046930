"""Whether this machine can run the mode: asked of the kernel, not guessed from versions."""

import platform

from kproxy_core.backend.api import BackendSettings, Detection, Requirement
from kproxy_core.backend.errors import SyncFailed, Unsupported
from kproxy_core.model.address import Cidr, Family, Protocol, parse_cidr
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_nftables import skeleton
from kproxy_nftables.kernel import BINDING_REMEDY, Kernel
from kproxy_nftables.names import NFT_FAMILY, Template

_MODE = "nftables"
_POD_CIDR: dict[Family, Cidr] = {
    Family.IPV4: parse_cidr("192.0.2.0/24"),
    Family.IPV6: parse_cidr("2001:db8::/32"),
}
_TEMPLATES = tuple(
    Template(protocol, policy, cluster, local, sticky, node_port)
    for protocol in Protocol
    for policy, cluster, local in (("cluster", 1, 0), ("local", 0, 1), ("external-local", 1, 1))
    for sticky in (False, True)
    for node_port in (False, True)
)


def detect(settings: BackendSettings) -> Detection:
    """Check the binding, then let the kernel check the whole rule set without keeping it."""
    kernel = Kernel(check_only=True)
    try:
        try:
            version = kernel.library_version()
        except Unsupported as missing:
            found = str(missing.__cause__)
            return Detection(_MODE, (Requirement("nftables Python binding", False, found, BINDING_REMEDY),))
        binding = Requirement("nftables Python binding", True, version)
        return Detection(_MODE, (binding, *(_rules(kernel, family) for family in settings.families)))
    finally:
        kernel.close()


def _rules(kernel: Kernel, family: Family) -> Requirement:
    what = f"nf_tables rules of family {NFT_FAMILY[family]}"
    node = NodeView(
        family=family,
        name="probe",
        local_source=LocalSource(cidr=_POD_CIDR[family]),
        node_ports_anywhere=True,
    )
    try:
        kernel.apply_text(skeleton.skeleton(node) + skeleton.templates(node, _TEMPLATES))
    except SyncFailed as refused:
        if "Operation not permitted" in str(refused):
            return Requirement(what, False, "permission denied", "run as root or with CAP_NET_ADMIN")
        return Requirement(
            what, False, str(refused),
            "needs Linux 5.13 or newer with nf_tables, numgen, fib, nat and reject",
        )  # fmt: skip
    return Requirement(what, True, f"accepted by Linux {platform.release()}")

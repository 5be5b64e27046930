"""Checks that the configuration, the node and the machine agree on the IP families.

kube-proxy 1.36 makes the same checks (cmd/kube-proxy/app/server.go), and more of them end its process.
"""

from collections.abc import Iterable, Iterator, Sequence

from kproxy_core.config.settings import Config, DetectLocalMode
from kproxy_core.model.address import Cidr, Family, family_of, parse_cidr
from kproxy_core.model.node import NodeObject
from kproxy_core.sync.node_facts import NodeSettings, primary_family


def unservable(config: Config, families: Sequence[Family]) -> str:
    """Return why *config* cannot be served on a machine with *families*; "" if it can."""
    if any(config.bind_address) and family_of(config.bind_address) not in families:
        return f"bindAddress is {family_of(config.bind_address).label}, which this machine does not have"
    if len(families) == 1 and _none_in(families[0], config.cluster_cidrs):
        other = _other(families[0]).label
        return f"this machine is {families[0].label}-only, but clusterCIDR has only {other}"
    return ""


def doubts(
    config: Config, settings: NodeSettings, families: Sequence[Family], node: NodeObject | None
) -> Iterator[str]:
    """Yield suspicious settings that are allowed and probably a mistake, one sentence each."""
    primary = primary_family(settings.bind_address, node)
    single = len(families) == 1
    kind = f"the cluster is {primary.label}-{'only' if single else 'primary'}"
    other = _other(primary).label
    if primary not in families:
        yield f"{kind}, but this machine does not have {primary.label}"
    if settings.node_ports == ():
        yield "nodePortAddresses is unset: node ports are served on all local addresses; consider `primary`"
    elif "primary" not in settings.node_ports:
        networks = [network for network in settings.node_ports if network != "primary"]
        yield from _node_ports_of_one_family(config, networks, families, node)
    if _none_in(primary, config.cluster_cidrs):
        yield f"{kind}, but clusterCIDR has only {other}"
    if node is not None and _none_in(primary, node.pod_cidrs):
        yield f"{kind}, but the pod networks of the Node are only {other}"
    if config.detect_local_mode is DetectLocalMode.NODE_CIDR and (node is None or not node.pod_cidrs):
        yield "detectLocalMode is NodeCIDR, but the Node has no pod networks yet"
    if not single:
        return
    excluded = config.backend_options.get("excludeCIDRs")
    if isinstance(excluded, tuple) and _none_in(primary, map(parse_cidr, excluded)):
        yield f"{kind}, but excludeCIDRs has only {other}"
    servers = {"healthzBindAddress": config.healthz_bind_address,
               "metricsBindAddress": config.metrics_bind_address}
    for field, server in servers.items():
        if server is not None and any(server.address) and family_of(server.address) is not primary:
            yield f"{kind}, but {field} is {other}"


def _node_ports_of_one_family(
    config: Config, given: Sequence[Cidr], families: Sequence[Family], node: NodeObject | None
) -> Iterator[str]:
    """Warn of a family without any node ports. kube-proxy serves it on all addresses instead."""
    used = {cidr.family for cidr in config.cluster_cidrs}
    if node is not None:
        used |= {family_of(address) for address in node.addresses}
    for family in families:
        if family in used and _none_in(family, given):
            everywhere = "::/0" if family is Family.IPV6 else "0.0.0.0/0"
            yield (
                f"nodePortAddresses has only {_other(family).label}: {family.label} node ports are not"
                f" served; add {everywhere} to serve them on all addresses, as kube-proxy does")


def _none_in(family: Family, cidrs: Iterable[Cidr]) -> bool:
    return {cidr.family for cidr in cidrs} == {_other(family)}


def _other(family: Family) -> Family:
    return Family.IPV6 if family is Family.IPV4 else Family.IPV4

"""Whether the configuration, the node and the machine mean the same IP families.

kube-proxy 1.36 checks the same, cmd/kube-proxy/app/server.go; there, more of it ends the process.
"""

from collections.abc import Iterable, Iterator, Sequence

from kproxy_core.config.settings import Config, DetectLocalMode
from kproxy_core.model.address import Address, Cidr, Family, family_of, parse_cidr
from kproxy_core.model.node import NodeObject
from kproxy_core.sync.node_facts import NodeSettings, primary_family


def unservable(config: Config, families: Sequence[Family]) -> str:
    """Why *config* can't be served on a machine with *families*; "": it can."""
    if any(config.bind_address) and family_of(config.bind_address) not in families:
        return f"bindAddress is {family_of(config.bind_address).label}, which this machine does not have"
    if len(families) == 1 and _none_in(families[0], config.cluster_cidrs):
        other = _other(families[0]).label
        return f"this machine is {families[0].label}-only, but clusterCIDR has only {other}"
    return ""


def doubts(
    config: Config, settings: NodeSettings, families: Sequence[Family], node: NodeObject | None
) -> Iterator[str]:
    """What is allowed and probably not meant; one sentence each."""
    primary = primary_family(settings.bind_address, node)
    single = len(families) == 1
    kind = f"the cluster is {primary.label}-{'only' if single else 'primary'}"
    other = _other(primary).label
    if primary not in families:
        yield f"{kind}, but this machine does not have {primary.label}"
    if settings.node_ports == ():
        yield "nodePortAddresses is unset: node ports are served on all local addresses; consider `primary`"
    elif settings.node_ports != "primary":
        given = {cidr.family for cidr in settings.node_ports}
        if given == {_other(primary)}:
            yield f"{kind}, but nodePortAddresses has only {other}"
        elif given == {primary} and len({cidr.family for cidr in config.cluster_cidrs}) == 2:
            yield f"clusterCIDR has both IP families, but nodePortAddresses has only {primary.label}"
    if _none_in(primary, config.cluster_cidrs):
        yield f"{kind}, but clusterCIDR has only {other}"
    if node is not None and _none_in(primary, node.pod_cidrs):
        yield f"{kind}, but the pod networks of the Node are only {other}"
    if config.detect_local_mode is DetectLocalMode.NODE_CIDR and (node is None or not node.pod_cidrs):
        yield "detectLocalMode is NodeCIDR, but the Node has no pod networks yet"
    if single:
        yield from _single_stack(config, kind, primary)


def _single_stack(config: Config, kind: str, primary: Family) -> Iterator[str]:
    other = _other(primary).label
    excluded = config.backend_options.get("excludeCIDRs")
    if isinstance(excluded, tuple) and _none_in(primary, map(parse_cidr, excluded)):
        yield f"{kind}, but excludeCIDRs has only {other}"
    servers = {"healthzBindAddress": config.healthz_bind_address,
               "metricsBindAddress": config.metrics_bind_address}
    for field, server in servers.items():
        if server is not None and _is_specific(server.address) and family_of(server.address) is not primary:
            yield f"{kind}, but {field} is {other}"


def _none_in(family: Family, cidrs: Iterable[Cidr]) -> bool:
    """There are some, and all are of the other family."""
    return {cidr.family for cidr in cidrs} == {_other(family)}


def _other(family: Family) -> Family:
    return Family.IPV6 if family is Family.IPV4 else Family.IPV4


def _is_specific(address: Address) -> bool:
    return any(address)

"""``kproxy doctor``: what on this node hurts Services."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import click

from kproxy_core.app.control import ask, send_request
from kproxy_core.app.doctor import (
    Finding,
    Json,
    Sample,
    Services,
    StaleFlow,
    Stop,
    UdpFrontends,
    drop_findings,
    findings,
    narrowed,
    samples,
    stale_flow_findings,
    unclear,
)
from kproxy_core.app.drops import Drop, drops
from kproxy_core.app.errors import NoProxy, RequestRefused
from kproxy_core.app.replies import ProxyStatus
from kproxy_core.app.requests import Explain, Plans, Status
from kproxy_core.cli.options import OBJECTS, OUTPUT, VERBOSE, FlagCommand, given, with_flags
from kproxy_core.cli.run import cli_errors, registry_of
from kproxy_core.cli.terminal import bad, faint, good, hint, show_answer
from kproxy_core.config.flags import RULES, SOURCES, Flags
from kproxy_core.linux.conntrack import UdpFlow, read_udp_flows
from kproxy_core.linux.errors import HostError, doing
from kproxy_core.linux.libnftables import list_chain
from kproxy_core.linux.node_state import NodeState, read_node_state
from kproxy_core.linux.tracing import is_outside_ip
from kproxy_core.model.address import Family, format_socket
from kproxy_core.model.service import Destination
from kproxy_core.netlink.messages import NETLINK_NETFILTER
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.expressions import Ruleset
from kproxy_core.nft.ruleset import ListedRuleset
from kproxy_core.observe.logs import printable

Found = Mapping[str, Any]


def read_services(flags: Flags) -> tuple[Services | None, str]:
    """Return the Services that *flags* name, else those of the running proxy, and why those are not known.

    None and "" without a running proxy. Raises as `cli_errors` expects.
    """
    if OBJECTS & set(flags):
        from kproxy_core.app.answers import documents
        from kproxy_core.cli.objects import read_objects

        with read_objects(flags, this_machine=True) as objects:
            mode = objects.registry.load(objects.instance.mode)
            return Services.of(mode.mode, documents(objects.plans), is_running=False,
                               dials_endpoints=bool(mode.base), needs_forwarding=mode.forwards), ""
    try:
        found = send_request(Plans())
    except NoProxy:
        return None, ""
    except RequestRefused as error:
        return None, f"the Services: {error}"
    mode = registry_of(flags).load(found["mode"])
    return Services.of(mode.mode, found["plans"], is_running=True, dials_endpoints=bool(mode.base),
                       needs_addresses=found.get("needs_addresses", ()), needs_forwarding=mode.forwards), ""


def examine(services: Services | None) -> Json:
    """Return what hurts *services* on this node, and what could not be told."""
    state = read_node_state(services.endpoints if services else ())
    stops: list[Stop] = []
    found: list[Finding] = []
    problems: list[str] = []
    if state.tables:
        try:
            stops, chains, untried = _stops(state, services)
            found += drop_findings(stops, chains)
            problems += untried
        except HostError as error:
            problems.append(str(error))
    found += findings(state, services)
    if services is not None and services.is_running and services.needs_forwarding:
        try:
            found += stale_flow_findings(_stale_flows(state, services))
        except (HostError, RequestRefused) as error:
            problems.append(str(error))
    return {
        "proxy": services.mode if services and services.is_running else "",
        "findings": [finding._asdict() for finding in found],
        "unclear": [*problems, *unclear(state, stops)],
    }


_MOST_STALE = 50
"""Frontends with stale flows about whose endpoints the proxy is asked."""


def _stale_flows(state: NodeState, services: Services) -> dict[StaleFlow, int]:
    """Return the tracked UDP flows that lead to no serving endpoint, with their numbers.

    Endpoints that serve and are not usable, such as terminating ones, keep their flows: the proxy is asked
    about those that are found. Raises HostError and RequestRefused.
    """
    found: Counter[StaleFlow] = Counter()
    for family in Family:
        frontends = UdpFrontends(state, services, family)
        if frontends.addresses:
            def collect(flows: Iterable[UdpFlow], frontends: UdpFrontends = frontends) -> Counter[StaleFlow]:
                return Counter(filter(None, (
                    frontends.stale(Destination(*flow.destination), Destination(*flow.answered_by))
                    for flow in flows)))

            found += read_udp_flows(family, frontends.addresses, collect)
    serving: dict[str, set[str]] = {}
    for flow in list(found)[:_MOST_STALE]:
        to = f"{format_socket(*flow.dialled)}/udp"
        if to not in serving:
            packets = send_request(Explain(to=to, sender="node"))["packets"]
            serving[to] = {each["endpoint"] for packet in packets for piece in packet["slices"]
                           for each in piece["endpoints"] if each["serving"]}
    return {flow: number for flow, number in list(found.items())[:_MOST_STALE]
            if format_socket(*flow.leads_to) not in serving[f"{format_socket(*flow.dialled)}/udp"]}


_MOST_NARROWED = 5_000
"""Packets to single frontends, or to single ports of endpoints, for one sample."""


def _stops(
    state: NodeState, services: Services | None
) -> tuple[list[Stop], Mapping[tuple[str, str], frozenset[str]], list[str]]:
    """Return the places where chains end samples, the chains of these tables, and what was not tried.

    Raises HostError.
    """
    stops: list[Stop] = []
    untried: list[str] = []
    text = cache(_text)
    with doing("read the filter chains"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        filters = ListedRuleset(sock)
        for sample in samples(state, services):
            found = _followed(filters, sample, text)
            certain = any(stop.drop.is_certain for stop in found)
            narrow = narrowed(sample, state, services) if found and not certain else iter(())
            tried = list(islice(narrow, _MOST_NARROWED))
            if next(narrow, None) is not None:
                untried.append(
                    f"packets {sample.what}: only {_MOST_NARROWED} of all frontends and ports were tried")
            for each in tried:
                stops += _followed(filters, each, text)
            if not tried and (certain or not sample.hook):
                stops += found
        tables = {(stop.drop.family, stop.drop.table) for stop in stops}
        untried += [
            printable(f"nft table {chain.family} {chain.table}, chain {chain.name} at hook {chain.hook} is "
                      "not followed; `kproxy trace` sees what it drops")
            for chain in filters.base_chains() if is_outside_ip(chain) and (
                chain.drops_by_policy or filters.rules(chain.family, chain.table, chain.name))]
        return stops, {table: filters.chain_names(*table) for table in tables}, untried


def _followed(filters: Ruleset, sample: Sample, text: Callable[[Drop], str]) -> list[Stop]:
    """Return the places where chains end *sample*, or may end it. Raises OSError."""
    found = drops(filters, sample.way, with_nat=True if sample.hook else None)
    return [Stop(sample, drop, text(drop)) for drop in found]


def _text(drop: Drop) -> str:
    """Return the rule of a certain drop as nft writes it; "" if it cannot."""
    if not drop.handle or not drop.is_certain:
        return ""
    try:
        listed = list_chain(drop.family, drop.table, drop.chain, ["handle_output"])
    except HostError:
        return ""
    mark = f" # handle {drop.handle}"
    return next((line.strip().removesuffix(mark) for line in listed.splitlines() if line.endswith(mark)), "")


def status_of(found: Found) -> int:
    return 1 if found["findings"] else 0


def as_text(found: Found) -> str:
    lines: list[str] = []
    for finding in found["findings"]:
        lines += _finding(finding)
    for problem in found["unclear"]:
        lines.append(f"{hint('not known')}: {problem}")
    if not found["findings"]:
        lines.append(good("nothing was found on this node that hurts Services"))
    lines.append(hint(
        "`kproxy explain` follows one packet, with --probe it sends one, `kproxy trace` watches the next"))
    return "\n".join(lines)


def _finding(finding: Mapping[str, Any]) -> Iterator[str]:
    yield f"{bad(finding['check'])}: {finding['what']}"
    evidence: Sequence[str] = finding["evidence"]
    yield from (f"  {faint(line)}" for line in evidence)
    yield f"  remedy: {finding['remedy']}"


@click.command("doctor", cls=FlagCommand)
@VERBOSE
@with_flags(RULES, SOURCES)
@OUTPUT
def command(output: str, **options: Any) -> int:
    """Find what on this node hurts Services.

    That is, among others, firewalls that drop forwarded packets, kernel settings, bridges, MTUs and other
    service proxies, each with evidence and what helps. Nothing is written. Exit status: 1 with findings,
    0 without.

    The Services are those of the running proxy, if there is one, or of --manifests, --kubeconfig, --master or
    --config.
    """
    with cli_errors():
        services, problem = read_services(given(options))
        told = ask(Status(), ProxyStatus).problems if services and services.is_running else []
    found = examine(services)
    if told:
        found["findings"].insert(0, Finding(
            "proxy", "kproxy does not serve all Services as their objects say", told,
            "correct the objects that are named; the log of kproxy has more")._asdict())
    if problem:
        found["unclear"].append(problem)
    show_answer(found, output, as_text)
    return status_of(found)

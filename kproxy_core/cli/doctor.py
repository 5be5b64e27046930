"""``kproxy doctor``: what on this node hurts Services."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import click

from kproxy_core.app.control import send_request
from kproxy_core.app.doctor import Finding, Json, Services, Stop, drop_findings, findings, samples, unclear
from kproxy_core.app.drops import Drop, drops
from kproxy_core.app.errors import NoProxy, RequestRefused
from kproxy_core.app.requests import Plans, Status
from kproxy_core.cli.options import OBJECTS, OUTPUT, VERBOSE, FlagCommand, given, with_flags
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.terminal import bad, faint, good, hint, show_answer
from kproxy_core.config.flags import RULES, SOURCES, Flags
from kproxy_core.linux.errors import HostError, doing
from kproxy_core.linux.libnftables import list_chain
from kproxy_core.linux.node_state import NodeState, read_node_state
from kproxy_core.netlink.messages import NETLINK_NETFILTER
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.ruleset import ListedRuleset

Found = Mapping[str, Any]


def read_services(flags: Flags) -> tuple[Services | None, str]:
    """Return the Services that *flags* name, else those of the running proxy, and why those are not known.

    None and "" without a running proxy. Raises as `cli_errors` expects.
    """
    if OBJECTS & set(flags):
        from kproxy_core.app.answers import documents
        from kproxy_core.cli.objects import read_objects

        with read_objects(flags, this_machine=True) as objects:
            return Services.of(objects.instance.mode, documents(objects.plans), is_running=False), ""
    try:
        found = send_request(Plans())
    except NoProxy:
        return None, ""
    except RequestRefused as error:
        return None, f"the Services: {error}"
    needing = found.get("needs_addresses", ())
    return Services.of(found["mode"], found["plans"], is_running=True, needs_addresses=needing), ""


def examine(services: Services | None) -> Json:
    """Return what hurts *services* on this node, and what could not be told."""
    state = read_node_state(services.endpoints if services else ())
    stops: list[Stop] = []
    found: list[Finding] = []
    problems: list[str] = []
    if state.tables:
        try:
            stops, chains = _stops(state, services)
            found += drop_findings(stops, chains)
        except HostError as error:
            problems.append(str(error))
    found += findings(state, services)
    return {
        "proxy": services.mode if services and services.is_running else "",
        "findings": [finding._asdict() for finding in found],
        "unclear": [*problems, *unclear(state, stops)],
    }


def _stops(
    state: NodeState, services: Services | None
) -> tuple[list[Stop], Mapping[tuple[str, str], frozenset[str]]]:
    """Return the places where filter chains end samples, and the chains of these tables. Raises HostError."""
    stops: list[Stop] = []
    text = cache(_text)
    with doing("read the filter chains"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        filters = ListedRuleset(sock)
        for sample in samples(state, services):
            way = [(hook, sample.packet) for hook in ("prerouting", "forward", "postrouting")]
            stops += [Stop(sample, drop, text(drop)) for drop in drops(filters, way)]
        tables = {(stop.drop.family, stop.drop.table) for stop in stops}
        return stops, {table: filters.chain_names(*table) for table in tables}


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
        lines.append(good("nothing on this node hurts Services"))
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
        told = send_request(Status())["problems"] if services and services.is_running else []
    found = examine(services)
    if told:
        found["findings"].insert(0, Finding(
            "proxy", "kproxy does not serve all Services as their objects say", told,
            "correct the objects that are named; the log of kproxy has more")._asdict())
    if problem:
        found["unclear"].append(problem)
    show_answer(found, output, as_text)
    return status_of(found)

"""``kubectl kproxy explain``: the way of packets through the cluster, from the sender to the endpoints."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from kproxy_core.cli.explain import OUTCOMES, VERDICTS
from kproxy_core.cli.kubectl.options import with_cluster_and_namespace
from kproxy_core.cli.kubectl.tables import aligned, progress_bar
from kproxy_core.cli.options import OUTPUT, FlagCommand
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.status import age
from kproxy_core.cli.terminal import bad, faint, good, hint, show_answer, strong

if TYPE_CHECKING:
    from kproxy_core.fleet.cluster import Cluster

Found = Mapping[str, Any]

_INDENT = 14
_MOST_NODES = 5
_MOST_SLICES = 5
_MOST_ENDPOINTS = 10
"""Shown as text; all are in the JSON."""


def as_text(found: Found) -> str:
    return "\n".join(_lines(found))


def _lines(found: Found) -> Iterator[str]:
    yield strong(f"from {found['from']} to {found['to']}")
    yield from (f"  {bad(line)}" for line in _problems(found["problems"]))
    yield from (f"  {hint(line)}" for line in _problems(found["settling"]))
    for way in found["ways"]:
        yield ""
        yield from _way(way)
    yield ""
    for at, probe in enumerate(found["probes"]):
        yield _line("" if at else "probe", _probe(probe))
    if found["egress_policies"]:
        yield _line("policies", f"egress of the sender: {', '.join(found['egress_policies'])}")
    if found["policies_problem"]:
        yield _line("policies", hint(found["policies_problem"]))
    for at, line in enumerate(_objects(found["objects"])):
        yield _line("" if at else "API server", faint(line))


def _probe(probe: Found) -> str:
    unclear = hint("unclear") if probe["unclear"] else good("answers as it should")
    words = bad("a problem") if probe["findings"] else unclear
    return f"{probe['to']}/{probe['protocol']} from {probe['source']} at {probe['node']}: {words}"


def _problems(problems: Sequence[Found]) -> Iterator[str]:
    """Yield the problems in words, those that several nodes have once."""
    nodes: dict[str, list[str]] = {}
    for problem in problems:
        when = f" (changed {_ago(problem)})" if problem["lags"] else ""
        nodes.setdefault(f"{problem['problem']}{when}", []).append(problem["node"])
    yield from (f"{_names(names)}: {what}" for what, names in nodes.items())


def _ago(found: Found) -> str:
    return "at an unknown time" if found["seconds"] is None else f"{age(found['seconds'])} ago"


def _names(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - _MOST_NODES} more" if len(nodes) > _MOST_NODES else ""
    return f"{', '.join(nodes[:_MOST_NODES])}{more}"


def _way(way: Found) -> Iterator[str]:
    frontend = way["frontend"]
    what = f"{frontend['kind']} of {frontend['service_port']}" if frontend else "no Service's frontend"
    yield f"at {_names(way['nodes'])}: {way['to']}/{way['protocol']}, {what}"
    yield _line("outcome", f"{OUTCOMES[way['outcome']](way['outcome'])}: {way['because']}")
    if resort := way["last_resort"]:
        yield _line("last resort", f"for {age(resort['seconds'])}: no endpoint is ready")
    if way["near"]:
        yield _line("nearest", way["near"])
    if way["source"]:
        yield _line("source", way["source"])
    yield from _table("endpoints", [
        (each["endpoint"], _share(each), _place(each), _there(each), _policies(each))
        for each in sorted(way["endpoints"], key=lambda each: each["there"] == "ready")])
    yield from _table("not chosen", [
        (each["endpoint"], each["because"], _place(each), _there(each), _policies(each))
        for each in way["not_chosen"]])
    kernel = way["kernel"]
    verdict = kernel["verdict"]
    yield _line("kernel", f"{VERDICTS[verdict](verdict)} ({', '.join(kernel['modes'])})")
    yield from _table("", [(line,) for line in (*kernel["differences"], *kernel["filters"])])


def _share(endpoint: Found) -> str:
    share = "share varies" if endpoint["share"] is None else f"{endpoint['share']:.1%}"
    return f"{share}{', masqueraded' if endpoint['masqueraded'] else ''}"


def _place(endpoint: Found) -> str:
    pod = f"pod {endpoint['pod']}" if endpoint["pod"] else ""
    return f"{pod} on {endpoint['node']}".lstrip() if endpoint["node"] else pod


def _there(endpoint: Found) -> str:
    said = "" if endpoint["there"] == endpoint.get("because") else endpoint["there"]
    return f"there: {good(said) if said == 'ready' else hint(said)}" if said else ""


def _policies(endpoint: Found) -> str:
    return f"ingress: {', '.join(endpoint['policies'])}" if endpoint["policies"] else ""


def _objects(objects: Sequence[Found]) -> Iterator[str]:
    for each in objects:
        yield f"Service {each['service']} {_version(each)}"
        yield from (f"EndpointSlice {piece['name']} {_version(piece)}"
                    for piece in each["slices"][:_MOST_SLICES])
        if len(each["slices"]) > _MOST_SLICES:
            yield f"and {len(each['slices']) - _MOST_SLICES} more EndpointSlices"


def _version(found: Found) -> str:
    return f"at resource version {found['resource_version']}, changed {_ago(found)}"


def _table(label: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for at, line in enumerate(islice(aligned(rows), _MOST_ENDPOINTS)):
        yield _line("" if at else label, line)
    if len(rows) > _MOST_ENDPOINTS:
        yield _line("", f"and {len(rows) - _MOST_ENDPOINTS} more, which -o json lists")


def _line(label: str, text: str) -> str:
    return f"  {label:{_INDENT - 2}}{text}"


@click.command("explain", cls=FlagCommand)
@click.argument("sender", metavar="FROM")
@click.argument("to", metavar="TO")
@click.option("--probe", is_flag=True, help="Also send packets from FROM, as `kproxy explain --probe` does.")
@with_cluster_and_namespace
@OUTPUT
def command(cluster: "Cluster", sender: str, to: str, probe: bool, namespace: str, output: str) -> int:
    """Explain what happens to packets from FROM to TO, and why, in the whole cluster.

    FROM is [NAMESPACE/]POD, NODE, an address or outside. TO is ADDRESS[:PORT[/PROTOCOL]],
    node:PORT[/PROTOCOL] or [NAMESPACE/]SERVICE[:PORT[/PROTOCOL]].

    The node that decides is asked, or every node if any may be dialled; then the nodes of the endpoints. What
    they know is compared with the API server's objects. Problems come first. Exit status: 1 if there are any,
    else 0.

    With --probe, FROM must be a node or a pod: its node opens connections to TO and to the endpoints
    themselves, as `kproxy explain --probe` does, and what that finds is a problem.
    """
    from kproxy_core.fleet.inquiry import Inquiry

    with cli_errors(), progress_bar("explain") as progress:
        inquiry = Inquiry(cluster, namespace or cluster.default_namespace, progress)
        found = inquiry.explain(sender, to, probe=probe)
    show_answer(found, output, as_text)
    return 1 if found["problems"] else 0

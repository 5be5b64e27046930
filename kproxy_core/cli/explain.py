"""``kproxy explain``: what happens to packets, by the plans and in the kernel."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import click

from kproxy_core.app.control import send_request
from kproxy_core.app.errors import NoProxy
from kproxy_core.app.requests import Explain
from kproxy_core.cli.options import OBJECTS, OUTPUT, VERBOSE, FlagCommand, given, with_flags
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.terminal import bad, faint, good, hint, show_answer, strong
from kproxy_core.config.flags import RULES, SOURCES, Flags

Packets = Sequence[Mapping[str, Any]]

_INDENT = 14
_SENDERS = {"pod": "a pod", "node": "this node", "outside": "outside"}
OUTCOMES = {
    "forwarded": good, "refused": bad, "dropped": bad, "not touched": hint, "depends": hint, "unknown": hint}
VERDICTS = {"agrees": good, "differs": bad, "deviates by design": hint, "cannot be told": hint}


def ask_proxy(request: Explain) -> Packets:
    """Return the answers of the proxy of this network namespace. Raises RequestRefused or NoProxy."""
    try:
        packets: Packets = send_request(request)["packets"]
    except NoProxy as error:
        raise NoProxy(f"{error}; to ask about objects instead, give --manifests or --kubeconfig") from error
    return packets


def explain_objects(request: Explain, flags: Flags, *, this_machine: bool = False) -> Packets:
    """Return the answers for the objects of `read_objects`. Raises NoAnswer, and as `cli_errors` expects."""
    from kproxy_core.app.answers import explain
    from kproxy_core.cli.objects import read_objects

    with read_objects(flags, this_machine=this_machine) as found:
        packets: Packets = explain(request, found, live=False)["packets"]
    return packets


def explain_report(request: Explain, path: str) -> Packets:
    """Return the answers for the objects in a report. Raises NoAnswer, and as `cli_errors` expects."""
    from kproxy_core.app.answers import explain
    from kproxy_core.cli.objects import read_objects
    from kproxy_core.cli.report import opened
    from kproxy_core.model.address import parse_address

    with opened(path) as (flags, node):
        addresses = frozenset(map(parse_address, node["addresses"]))
        with read_objects(flags, this_machine=False, addresses=addresses) as found:
            for service in found.store.origins:
                found.store.origins[service] = node["origins"].get(str(service), "")
            packets: Packets = explain(request, found, live=False)["packets"]
    return packets


def as_text(answer: Mapping[str, Packets]) -> str:
    parts = []
    for target, answers in groupby(answer["packets"], key=lambda packet: (packet["to"], packet["protocol"])):
        found = list(answers)
        parts.append("\n".join([strong(_title(target, found[0])), *(
            line for packet in found for line in ("", *_answer(packet)))]))
    if any(_is_uncertain(packet) for packet in answer["packets"]):
        parts.append(hint(
            "`kproxy doctor` looks for what stops packets here, `kproxy trace` watches the next ones"))
    return "\n\n".join(parts)


def _is_uncertain(packet: Mapping[str, Any]) -> bool:
    """Return whether something is not known that decides what becomes of a packet on this node."""
    kernel = packet["kernel"]
    return kernel["live"] and (kernel["verdict"] == "cannot be told" or any(
        way["share"] is None for way in packet.get("ways", ())))


def _title(target: tuple[str, str], packet: Mapping[str, Any]) -> str:
    where = "/".join(target)
    frontend = packet["frontend"]
    if frontend is None:
        return f"{where} is no Service's frontend"
    created = f", created {frontend['created']}" if frontend["created"] else ""
    origin = f", {frontend['origin']}" if frontend["origin"] else ""
    return f"{where}: {frontend['kind']} of {frontend['service_port']}{created}{origin}"


def _answer(packet: Mapping[str, Any]) -> Iterator[str]:
    typical = ", as an example" if packet["typical_sender"] else ""
    yield f"from {_SENDERS[packet['origin']]} ({packet['from']}{typical})"
    yield _line("outcome", f"{OUTCOMES[packet['outcome']](packet['outcome'])}: {packet['because']}")
    if remedy := packet.get("remedy"):
        yield _line("remedy", remedy)
    if resort := packet["last_resort"]:
        yield _line("last resort", (
            f"for {resort['seconds']:.0f} s: no endpoint is ready ({max(0, resort['left']):.0f} s left)"))
    if packet["near"]:
        yield _line("nearest", packet["near"])
    yield from _table("endpoints", [
        (e["endpoint"], f"{e['share']:.1%}{', masqueraded' if e['masqueraded'] else ''}")
        for e in packet["endpoints"]
    ])  # fmt: skip
    yield from _table("not chosen", [(e["endpoint"], e["because"]) for e in packet["not_chosen"]])
    if packet["source"]:
        yield _line("source", packet["source"])
    if affinity := packet["affinity"]:
        pinned = affinity["remembered"]
        yield _line("affinity", f"{affinity['seconds']} s; " + (
            f"this sender is pinned to {pinned}" if pinned else "no endpoint is remembered for this sender"))
    if packet["removed_endpoints"] == "reset":
        yield _line("removed", "connections to endpoints that the Service has lost are reset")
    for caveat in packet["caveats"]:
        yield _line("caveat", caveat)
    yield from _kernel(packet["kernel"])
    if packet.get("probe"):
        from kproxy_core.cli.probe import lines

        for at, line in enumerate(lines(packet)):
            yield _line("" if at else "probe", line)


def _kernel(kernel: Mapping[str, Any]) -> Iterator[str]:
    how = "read now" if kernel["live"] else "as a proxy would write it"
    verdict = kernel["verdict"]
    yield _line("kernel", f"{VERDICTS[verdict](verdict)} ({kernel['mode']}, {how})")
    for difference in kernel["differences"]:
        yield _line("", difference)
    yield from _table("", [(item["where"], faint(item["text"])) for item in kernel["objects"]])
    for at, place in enumerate(kernel.get("filters", ())):
        yield _line("" if at else "filters", bad(place))


def _table(label: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max((len(row[0]) for row in rows), default=0)
    for at, (first, second) in enumerate(rows):
        yield _line("" if at else label, f"{first:{width}}  {second}")


def _line(label: str, text: str) -> str:
    return f"  {label:{_INDENT - 2}}{text}"


@click.command("explain", cls=FlagCommand)
@click.argument("words", metavar="[FROM] TO", nargs=-1, required=True)
@click.option("--from", "sender", metavar="ADDRESS", help="Address of the sender, as FROM.")
@click.option("--from-pod", "origin", flag_value="pod", help="The sender is a pod of this node.")
@click.option("--from-node", "origin", flag_value="node", help="The sender is a process of this node.")
@click.option("--probe", is_flag=True, help="Also send packets: to TO, and to each of its endpoints.")
@click.option("--report", metavar="FILE", help="Answer from an archive that `kproxy report` wrote.")
@VERBOSE
@with_flags(RULES, SOURCES)
@OUTPUT
def command(
    words: tuple[str, ...], sender: str | None, origin: str | None, probe: bool, report: str | None,
    output: str, **options: Any,
) -> int:
    """Explain what happens to packets to a Service, and why.

    TO is ADDRESS[:PORT[/PROTOCOL]], node:PORT[/PROTOCOL] or [NAMESPACE/]SERVICE[:PORT[/PROTOCOL]], with the
    name or the number of a Service's port. FROM is an address, pod, node or outside. Without FROM, the answer
    has one sender of each kind.

    The running proxy answers, and reads the kernel. With --manifests, --kubeconfig, --master or --config, the
    answer is about those objects, and shows the rules that a proxy would write.

    With --probe, this node, or the pod on it whose address is FROM, opens TCP connections to TO and to the
    endpoints themselves, 50 a second, and closes them at once; for UDP it sends empty datagrams. That tells
    endpoints that refuse or do not answer, and answers that do not come back. Exit status with --probe: 0 if
    all answer as they should, 1 if not, or if that is unclear.
    """
    if len(words) > 2 or (len(words) == 2 and sender):
        raise click.UsageError("give [FROM] TO")
    sender = sender or (words[0] if len(words) == 2 else "")
    if probe and report:
        raise click.UsageError("--probe sends packets from this machine: it cannot be used with --report")
    request = Explain(to=words[-1], sender=sender, origin=origin or "")
    flags = given(options)
    with cli_errors():
        if probe:
            from kproxy_core.cli.probe import check

            check(request.sender, request.origin)
        if report:
            packets = explain_report(request, report)
        elif OBJECTS & set(flags):
            packets = explain_objects(request, flags, this_machine=probe)
        else:
            packets = ask_proxy(request)
        if not probe:
            show_answer({"packets": packets}, output, as_text)
            return 0
        from kproxy_core.cli.probe import probed, status_of

        packets, problem = probed(packets)
    if problem:
        click.echo(f"Warning: {problem}", err=True)
    show_answer({"packets": packets}, output, as_text)
    return status_of(packets)

"""``kproxy status``: whether this node's proxy is well."""

from collections.abc import Iterator, Sequence

import click
from msgspec.structs import replace

from kproxy_core.app.control import ask
from kproxy_core.app.replies import ProxyStatus, replied
from kproxy_core.app.requests import Status
from kproxy_core.cli.options import OUTPUT, FlagCommand
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.terminal import bad, good, hint, show_answer
from kproxy_core.config.release import described


def as_text(found: ProxyStatus) -> str:
    return "\n".join(_lines(found))


def _lines(found: ProxyStatus) -> Iterator[str]:
    now = found.now
    verdict = good("well") if found.well else bad("not well")
    since = f" for {age(now - found.since)}" if found.since else ""
    yield f"{found.node}: {verdict}{since}"
    for problem in found.problems:
        yield f"  {bad(problem)}"
    wanted = "" if found.configured == found.mode else f", configured: {found.configured or 'none'}"
    if found.label:
        wanted = f", by label {found.label}"
    yield f"mode             {found.mode}{wanted}"
    version = described(found.version, found.commit)
    yield f"version          {version}, running for {age(now - found.started)}"
    last = "never" if found.last_sync is None else f"{age(now - found.last_sync)} ago"
    yield f"last sync        {last}"
    lag = f"the oldest has been waiting for {age(found.lag)}" if found.lag else "all programmed"
    yield f"changes          {lag}"
    yield f"foreign changes  {found.foreign_changes}"
    if found.healthz is not None:
        eligible = found.healthz.body.get("nodeEligible", True)
        yield f"/healthz         {found.healthz.code}{'' if eligible else ', the node is not eligible'}"
    if found.findings:
        yield f"doctor           {hint(_findings(found.findings))}"


def _findings(checks: Sequence[str]) -> str:
    return f"{len(checks)}: {', '.join(checks)}; `kproxy doctor` has evidence and remedies"


def age(seconds: float) -> str:
    """Return *seconds* in the largest unit that has at least two of it, such as ``47 h``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


@click.command("status", cls=FlagCommand)
@click.option(
    "--doctor/--no-doctor", default=True, help="Ask `kproxy doctor`, too, which takes longer; the default.")
@OUTPUT
def command(doctor: bool, output: str) -> int:
    """Say whether this node's proxy is well, and all that is wrong.

    Wrong is what keeps Services from being served as their objects say: changes that are not programmed,
    objects with mistakes, endpoints of Forwards that fail their checks, ports that cannot be opened, and of
    what `kproxy doctor` finds, firewalls, translations of other programs, other service proxies and a node
    that forwards nothing. Exit status: 0 if nothing is wrong, else 1, also without a proxy.
    """
    with cli_errors():
        found = ask(Status(), ProxyStatus)
        if doctor:
            from kproxy_core.app.doctor import NOT_SERVED
            from kproxy_core.cli.doctor import examine, read_services
            from kproxy_core.config.flags import Flags

            findings = examine(read_services(Flags())[0])["findings"]
            more = [f"{each['check']}: {each['what']}" for each in findings if each["check"] in NOT_SERVED]
            well = found.well and not more
            since = found.since if well == found.well else 0.0  # only the proxy knows since when
            found = replace(
                found, findings=[finding["check"] for finding in findings], well=well, since=since,
                problems=[*found.problems, *more])
    show_answer({"ok": True, **replied(found)}, output, lambda _: as_text(found))
    return 0 if found.well else 1

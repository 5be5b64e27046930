"""``kproxy status``: whether this node's proxy is well."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from kproxy_core.app.control import send_request
from kproxy_core.app.requests import Status
from kproxy_core.cli.options import OUTPUT, FlagCommand
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.terminal import bad, good, hint, show_answer
from kproxy_core.config.release import described

Found = Mapping[str, Any]


def as_text(found: Found) -> str:
    return "\n".join(_lines(found))


def _lines(found: Found) -> Iterator[str]:
    now = found["now"]
    verdict = good("well") if found["well"] else bad("not well")
    since = f" for {age(now - found['since'])}" if found["since"] else ""
    yield f"{found['node']}: {verdict}{since}"
    for problem in found["problems"]:
        yield f"  {bad(problem)}"
    wanted = "" if found["configured"] == found["mode"] else f", configured: {found['configured'] or 'none'}"
    if label := found.get("label"):
        wanted = f", by label {label}"
    yield f"mode             {found['mode']}{wanted}"
    version = described(found["version"], found["commit"])
    yield f"version          {version}, running for {age(now - found['started'])}"
    last = "never" if found["last_sync"] is None else f"{age(now - found['last_sync'])} ago"
    yield f"last sync        {last}"
    lag = f"the oldest has been waiting for {age(found['lag'])}" if found["lag"] else "all programmed"
    yield f"changes          {lag}"
    yield f"foreign changes  {found['foreign_changes']}"
    eligible = found["healthz"]["body"].get("nodeEligible", True)
    yield f"/healthz         {found['healthz']['code']}{'' if eligible else ', the node is not eligible'}"
    if found.get("findings"):
        yield f"doctor           {hint(_findings(found['findings']))}"


def _findings(checks: list[str]) -> str:
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
        found = dict(send_request(Status()))
        if doctor:
            from kproxy_core.app.doctor import NOT_SERVED
            from kproxy_core.cli.doctor import examine, read_services
            from kproxy_core.config.flags import Flags

            examined = examine(read_services(Flags())[0])
            found["findings"] = [finding["check"] for finding in examined["findings"]]
            found["problems"] += [f"{each['check']}: {each['what']}" for each in examined["findings"]
                                  if each["check"] in NOT_SERVED]
            if found["well"] and found["problems"]:
                found |= {"well": False, "since": 0.0}  # only the proxy knows since when
    show_answer(found, output, as_text)
    return 0 if found["well"] else 1

"""``kproxy status``: whether this node's proxy is well."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from kproxy_core.app.control import send_request
from kproxy_core.app.requests import Status
from kproxy_core.cli.options import OUTPUT, FlagCommand
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.terminal import bad, good, hint, show_answer

Found = Mapping[str, Any]


def as_text(found: Found) -> str:
    return "\n".join(_lines(found))


def _lines(found: Found) -> Iterator[str]:
    now = found["now"]
    verdict = good("well") if found["well"] else bad("not well")
    yield f"{found['node']}: {verdict} for {age(now - found['since'])}"
    for problem in found["problems"]:
        yield f"  {bad(problem)}"
    commit = f" ({found['commit']})" if found["commit"] else ""
    wanted = "" if found["configured"] == found["mode"] else f", configured: {found['configured'] or 'none'}"
    if label := found.get("label"):
        wanted = f", by label {label}"
    yield f"mode             {found['mode']}{wanted}"
    yield f"version          {found['version']}{commit}, running for {age(now - found['started'])}"
    last = "never" if found["last_sync"] is None else f"{age(now - found['last_sync'])} ago"
    yield f"last sync        {last}"
    lag = f"the oldest has been waiting for {age(found['lag'])}" if found["lag"] else "all programmed"
    yield f"changes          {lag}"
    yield f"foreign changes  {found['foreign_changes']}"
    eligible = found["healthz"]["body"].get("nodeEligible", True)
    yield f"/healthz         {found['healthz']['code']}{'' if eligible else ', the node is not eligible'}"
    if "findings" in found:
        yield f"doctor           {_findings(found['findings'])}"


def _findings(checks: list[str]) -> str:
    return hint(f"{len(checks)}: {', '.join(checks)}; see `kproxy doctor`") if checks else "finds nothing"


def age(seconds: float) -> str:
    """Return *seconds* in the largest unit that has at least two of it, such as ``47 h``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


@click.command("status", cls=FlagCommand)
@click.option("--doctor", is_flag=True, help="Also count what `kproxy doctor` finds.")
@OUTPUT
def command(doctor: bool, output: str) -> int:
    """Say whether this node's proxy is well.

    Exit status: 0 if it is, 1 if it is not or does not run. Findings of --doctor do not change it.
    """
    with cli_errors():
        found = dict(send_request(Status()))
        if doctor:
            from kproxy_core.cli.doctor import examine, read_services
            from kproxy_core.config.flags import Flags

            examined = examine(read_services(Flags())[0])
            found["findings"] = [finding["check"] for finding in examined["findings"]]
    show_answer(found, output, as_text)
    return 0 if found["well"] else 1

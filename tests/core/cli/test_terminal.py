"""Output for people on a terminal, for pipes, and for programs."""

import json
import os
import pty
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kproxy_core.app import control
from kproxy_core.app.control import ControlServer
from kproxy_core.app.errors import RequestRefused
from kproxy_core.app.requests import Compare, Request, Switch, Top
from kproxy_core.cli import kproxy
from kproxy_core.cli.modes import DescribedMode, Report, formatted
from kproxy_core.cli.terminal import bad, hint
from kproxy_core.contract.values import Description, Detection, Requirement

KPROXY = str(Path(sys.executable).with_name("kproxy"))


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """Return the output of ``kproxy`` with *arguments* on a terminal."""
    ours, theirs = pty.openpty()
    known = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    with subprocess.Popen([KPROXY, *arguments], stdout=theirs, env={**known, **environment}):
        os.close(theirs)
        text = b""
        try:
            while piece := os.read(ours, 65536):
                text += piece
        except OSError:  # EIO: the other end is closed
            pass
    os.close(ours)
    return text.decode()


def piped(*arguments: str) -> str:
    done = subprocess.run([KPROXY, *arguments], stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    return done.stdout


def test_probed_modes_have_colours_on_a_terminal() -> None:
    text = on_a_terminal("modes", "nftables", "--probe")
    assert "nftables     \x1b[32musable" in text


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_text() -> None:
    text = on_a_terminal("modes", "nftables", "--probe", TERM="dumb")
    assert text.startswith("a proxy started like this would serve in mode nftables\r\n")
    assert "\x1b" not in text


def test_a_missing_requirement_stands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy_core.cli.modes.is_terminal", lambda: True)
    missing = Requirement("a warp drive", False, "none", "build one")
    detection = Detection((Requirement("a moon", True, "full"), missing), "warp")
    warp = DescribedMode(Description("warp", "", (1, 0)), detection)
    report = Report({"kernel": "Linux"}, (warp,))
    summary = f"warp         {bad('not usable')}  a warp drive: none"
    assert formatted(report, "text").splitlines()[1:] == [summary, f"{'':<12} {hint('build one')}"]
    text = formatted(report, "text", verbose=True)
    assert f"  {bad('missing ')} a warp drive: none" in text
    assert hint("build one") in text


def test_no_color_is_respected() -> None:
    text = on_a_terminal("modes", "nftables", "--probe", NO_COLOR="1")
    assert "nftables     usable" in text
    assert "\x1b" not in text


def test_without_a_terminal_the_text_is_plain_and_complete() -> None:
    text = piped("modes", "nftables", "--probe", "-v")
    assert "\x1b" not in text
    assert "  ok       CAP_NET_ADMIN: held" in text.splitlines()


def test_a_cleanup_counts_on_a_terminal_and_is_json_on_demand() -> None:
    counted = on_a_terminal("--cleanup", "--dry-run", NO_COLOR="1").splitlines()[-1]
    found = json.loads(piped("--cleanup", "--dry-run", "-o", "json"))
    assert found["dry_run"]
    total = sum(len(mode["removed"]) for mode in found["modes"])
    counts = ", ".join(f"{mode['mode']} {len(mode['removed'])}" for mode in found["modes"])
    assert counted == f"{total} objects would be removed ({counts})"


def test_an_output_format_needs_cleanup() -> None:
    assert CliRunner().invoke(kproxy, ["-o", "json"]).exit_code


NO_TRAFFIC = {"forwarded": 0, "bytes_to_endpoint": 0, "bytes_from_endpoint": 0, "refused": 0,
              "unanswered": 0, "reset": 0}
SERVICE = {
    **NO_TRAFFIC, "service_port": "default/web", "protocol": "TCP", "problems": [], "frontends": [],
    "endpoint_count": 2, "rate": 0.0, "rejected": 0, "failed": 3,
    "endpoints": [
        {**NO_TRAFFIC, "endpoint": "10.0.0.1:80", "usable": True, "quarantine": "", "forwarded": 5},
        {**NO_TRAFFIC, "endpoint": "10.0.0.2:80", "usable": True, "forwarded": 3, "unanswered": 3,
         "quarantine": "in quarantine for 12 s: 3 of 3 attempts unanswered"},
        {**NO_TRAFFIC, "endpoint": "10.0.0.3:80", "usable": False, "forwarded": 2},
    ],
}  # fmt: skip
"""Of the answer to `top`."""


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that runs here, and answers about modes."""
    monkeypatch.setattr(control, "PREFIX", f"kproxy/test-{secrets.token_hex(4)}/")

    def answer(request: Request, report_progress: Callable[[str], None]) -> Mapping[str, Any]:
        if isinstance(request, Top):
            return {"status": {"node": "n1", "mode": "old", "healthy": True, "well": True, "problems": []},
                    "found": 1, "all": 1, "counted": True, "services": [SERVICE]}
        assert isinstance(request, Compare | Switch)
        if request.mode == "absent":
            raise RequestRefused("no backend provides mode 'absent'")
        if isinstance(request, Compare):
            lost = {"what": "is not served", "lost": True, "only_here": False, "service_port": "default/web"}
            return {"mode": "old", "appearing": [lost], "disappearing": [], "loses": True,
                    "kernel": [{"family": "IPv4", "operations": 7}]}
        report_progress("new works here")
        return {"mode": "new", "configured": "old"}

    server = ControlServer(answer)
    server.start()
    yield
    server.stop()


@pytest.mark.parametrize(("arguments", "status", "printed"), [
    (["new"], 0, "new works here\n"
     "the configuration has mode 'old': set 'new' to keep it after a reboot\n"),
    (["new", "--check"], 1, "new, IPv4: 7 operations\nlost: default/web: is not served\n"),
    (["absent"], 1, ""),
], ids=str)  # fmt: skip
def test_a_switch_is_reported_in_plain_lines(
    proxy: None, arguments: list[str], status: int, printed: str
) -> None:
    done = CliRunner().invoke(kproxy, ["switch", *arguments])
    assert (done.exit_code, done.stdout) == (status, printed)


def test_one_look_at_the_traffic_names_no_keys(proxy: None) -> None:
    done = CliRunner().invoke(kproxy, ["top", "--once"])
    first, *_, last = done.stdout.splitlines()
    assert (done.exit_code, first.rstrip()) == (0, "n1  old  well  1 of 1 service ports")
    assert last.rstrip() == "order: rate"
    assert [" ".join(line.split()) for line in done.stdout.splitlines() if "10.0.0." in line] == [
        "10.0.0.1:80 5 0 -",
        "10.0.0.2:80 (in quarantine for 12 s: 3 of 3 attempts 3 3 -",
        "10.0.0.3:80 (no longer usable) 2 0 -",
    ]


def test_a_switch_is_reported_in_json(proxy: None) -> None:
    done = CliRunner().invoke(kproxy, ["switch", "new", "-o", "json"])
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"step": "new works here"}, {"ok": True, "mode": "new", "configured": "old"}]
    checked = json.loads(CliRunner().invoke(kproxy, ["switch", "new", "--check", "-o", "json"]).stdout)
    assert checked["appearing"][0]["service_port"] == "default/web"

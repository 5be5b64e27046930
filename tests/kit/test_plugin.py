"""The pytest plugin: what it costs others, and what it tells its users."""

import os
import subprocess
import sys
from pathlib import Path

from tests.kit.conftest import EXAMPLE

PLAIN = ("--kproxy-mode=plain", "--kproxy-plugin=kproxy_plain")


def pytest_in(directory: Path, *arguments: str, ini: str = "") -> "subprocess.CompletedProcess[str]":
    (directory / "pytest.ini").write_text(f"[pytest]\n{ini}")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "--rootdir=.", *arguments],
        cwd=directory, env={**os.environ, "PYTHONPATH": f"{EXAMPLE}{os.pathsep}."},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_without_the_option_nothing_is_imported_or_added(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import sys\ndef test_own():\n"
        "    ours = {name for name in sys.modules if name.startswith('kproxy')}\n"
        "    assert ours == {'kproxy_conformance', 'kproxy_conformance.pytest_plugin'}\n"
    )
    done = pytest_in(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_checks_run_beside_own_tests_or_alone(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_describes(): pass\n")
    assert "2 passed" in pytest_in(tmp_path, *PLAIN, "-k", "describes").stdout
    done = pytest_in(tmp_path, *PLAIN, "-k", "describes", "-m", "kproxy")
    assert "1 passed, 0 failed, 0 not applicable" in done.stdout
    assert "mode plain, contract 1." in done.stdout


def test_a_scenario_is_played_by_each_driver_that_is_named(tmp_path: Path) -> None:
    drivers = [f"--kproxy-driver={name}" for name in ("backend", "kproxy", "kproxy-through-api")]
    done = pytest_in(tmp_path, "--kproxy-mode=nftables", *drivers, "-k", "clusterip-udp and IPv4", "-v")
    assert "3 passed, 0 failed, 0 not applicable" in done.stdout, done.stdout
    for group in ("scenarios", "scenarios-of-kproxy", "scenarios-of-kproxy-through-api"):
        assert f"{group}::clusterip-udp[IPv4] PASSED" in done.stdout


def test_what_needs_a_whole_process_is_told(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, *PLAIN, "-k", "status-endpoints or killed-in-between and IPv6")
    assert done.returncode == 0
    by_whom = "so only the drivers of a whole kproxy play it"
    assert f"status-endpoints[IPv4]: not applicable: asks for pages of the process, {by_whom}" in done.stdout
    assert f"killed-in-between[IPv6]: not applicable: kills the process, {by_whom}" in done.stdout
    assert "0 passed, 0 failed, 2 not applicable" in done.stdout


def test_what_is_declared_is_not_asked_and_is_told(tmp_path: Path) -> None:
    ini = "kproxy_not_applicable =\n    describes-itself: it is shy\n"
    done = pytest_in(tmp_path, *PLAIN, "-k", "describes", ini=ini)
    assert done.returncode == 0
    assert "contract::describes-itself: not applicable: it is shy\n0 passed, 0 failed, 1 not" in done.stdout


def test_mistakes_of_the_author_are_named(tmp_path: Path) -> None:
    unknown = pytest_in(tmp_path, *PLAIN, ini="kproxy_not_applicable = describes-nobody\n")
    assert unknown.returncode == 4
    assert "kproxy_not_applicable: there is no check describes-nobody" in unknown.stderr
    option = pytest_in(tmp_path, *PLAIN, "--kproxy-option=workers")
    assert "--kproxy-option 'workers' must be NAME=VALUE" in option.stderr
    missing = pytest_in(tmp_path, "--kproxy-mode=nobody", "-k", "describes")
    assert missing.returncode == 1
    assert "no backend provides mode 'nobody'" in missing.stdout


def test_a_failure_says_what_must_hold_and_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from kproxy_core.contract import SyncReport, hookimpl\n"
        "@hookimpl(wrapper=True)\ndef kproxy_sync():\n    yield\n    return SyncReport(0)\n"
    )
    done = pytest_in(
        tmp_path, *PLAIN, "--kproxy-plugin=broken", "-k", "writes-and-reports and IPv4", "-p", "no:warnings"
    )
    assert "What must hold: The first full sync programs what it is given" in done.stdout
    assert "sync() reported 0 operations for Services of every kind" in done.stdout
    assert "Traceback" not in done.stdout

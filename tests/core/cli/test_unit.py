"""``kproxy unit``: systemd accepts it, and what it confines kproxy to suffices."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from kproxy_core.cli.unit import unit
from kproxy_core.config.file import Kproxy
from tests.core.processes import KPROXY, kproxy

SECCOMP = Path(__file__).parents[3] / "deploy" / "seccomp"


def analyze(*arguments: str) -> str:
    done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def values(text: str, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


@pytest.fixture
def printed() -> str:
    done = kproxy("unit")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_unit_runs_the_executable_that_printed_it(printed: str) -> None:
    assert values(printed, "ExecStart") == [f"{KPROXY} --config=/etc/kproxy/config.yaml"]
    assert values(printed, "ExecStartPre")[0] == f"+{KPROXY} --config=/etc/kproxy/config.yaml --init-only"
    other = kproxy("unit", "--config", "/srv/kproxy.yaml").stdout
    assert values(other, "ExecStart") == [f"{KPROXY} --config=/srv/kproxy.yaml"]


def test_systemd_accepts_the_unit(printed: str, tmp_path: Path) -> None:
    file = tmp_path / "kproxy.service"
    file.write_text(printed)
    assert analyze("verify", str(file)) == ""
    assert "OK" in analyze("security", "--offline=true", "--threshold=30", str(file))


def test_paths_with_blanks_and_other_characters_are_found(tmp_path: Path) -> None:
    executable = tmp_path / "a $HOME; 100%i" / "kproxy"
    executable.parent.mkdir()
    executable.write_text("#!/bin/sh\n")
    file = tmp_path / "kproxy.service"
    file.write_text(unit(str(executable), "/etc/kproxy/config.yaml"))
    assert "not executable" in refusal(file)
    executable.chmod(0o755)
    assert analyze("verify", str(file)) == ""
    assert values(unit("/kproxy", "/a b/$HOME/'100%'"), "ExecStart") == [
        r"/kproxy --config=/a\x20b/$$HOME/\x27100%%\x27"]


def test_the_lock_of_iptables_may_be_missing_before_the_first_start(printed: str) -> None:
    """systemd prepares the writable paths for the command that creates it, too, and fails without a minus."""
    assert "+/usr/bin/touch /run/xtables.lock" in values(printed, "ExecStartPre")
    assert values(printed, "ReadWritePaths") == ["-/run/xtables.lock"]


def refusal(file: Path) -> str:
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stderr


def test_home_directories_are_hidden_unless_they_hold_what_is_needed() -> None:
    assert values(unit("/usr/bin/kproxy", "/etc/kproxy.yaml"), "ProtectHome") == ["yes"]
    for executable, config, other in (
        ("/root/kproxy/.venv/bin/kproxy", "/etc/kproxy.yaml", "/usr/bin/python3"),
        ("/usr/bin/kproxy", "/home/me/kproxy.yaml", "/usr/bin/python3"),
        ("/usr/bin/kproxy", "/etc/kproxy.yaml", "/root/.local/bin/python3"),
    ):
        assert values(unit(executable, config, [other]), "ProtectHome") == ["read-only"]


def test_the_state_is_kept_in_the_directory_that_outlives_the_process(printed: str) -> None:
    (name,) = values(printed, "RuntimeDirectory")
    assert Kproxy().state_directory == f"/run/{name}"
    assert values(printed, "RuntimeDirectoryPreserve") == ["yes"]


def expanded(name: str) -> set[str]:
    """Return the system calls of a group of systemd, or *name* itself."""
    if not name.startswith("@"):
        return {name}
    _, *members = [line.strip() for line in analyze("syscall-filter", name).splitlines()]
    return {call for member in members if member[:1] not in ("", "#") for call in expanded(member)}


def allowed(text: str) -> set[str]:
    """Return the system calls that the filters of the unit *text* allow."""
    calls: set[str] = set()
    for line in values(text, "SystemCallFilter"):
        named = {call for name in line.removeprefix("~").split() for call in expanded(name)}
        calls = calls - named if line.startswith("~") else calls | named
    return calls


def test_the_filter_allows_what_the_profiles_for_pods_allow_and_no_attack(printed: str) -> None:
    profiles = {
        name: set(json.loads((SECCOMP / f"{name}.json").read_text())["syscalls"][0]["names"])
        for name in ("kproxy", "kproxy-ebpf")
    }
    found = allowed(printed)
    assert profiles["kproxy"] - found == set()
    assert profiles["kproxy-ebpf"] - found == {"bpf"}
    assert not found & {
        "add_key", "bpf", "chroot", "delete_module", "finit_module", "init_module", "io_uring_setup", "iopl",
        "ioperm", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "mount", "open_by_handle_at",
        "perf_event_open", "pidfd_getfd", "pivot_root", "process_vm_readv", "process_vm_writev", "ptrace",
        "reboot", "request_key", "setns", "settimeofday", "swapon", "umount2", "unshare", "userfaultfd",
    }  # fmt: skip

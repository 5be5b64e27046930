"""The guest: a kernel for all modes, live output, exit statuses, and an unchanged host."""

import subprocess
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from kproxy_conformance.network.patience import patience
from tests.guest.guest import LONGEST, RUN, Guest


def run(command: str, tmp_path: Path, seconds: int = LONGEST) -> tuple[int, str]:
    """Exit status and output of a shell command in a guest that may write to *tmp_path*."""
    with Guest(["sh", "-c", command], tmp_path / "guest.log", share=tmp_path, seconds=seconds) as guest:
        return guest.status(), guest.output


def test_kernel_has_what_the_modes_need(tmp_path: Path) -> None:
    command = """set -e
        case $(uname -r) in 6.1.*) grep shortcuts /proc/modules; esac
        modprobe -a ip_vs ip_vs_rr dummy
        cat /proc/net/ip_vs
        ipset create s hash:ip
        ipset list -name
        nft add table inet t
        nft add chain inet t c '{ type nat hook postrouting priority 0; }'
        nft add rule inet t c fib daddr type local masquerade
        for program in iptables-nft iptables-legacy ip6tables-nft ip6tables-legacy; do
            $program -t nat -A POSTROUTING -m addrtype --dst-type LOCAL -j MASQUERADE
        done
    """
    status, output = run(command, tmp_path)
    assert status == 0, output
    assert "IP Virtual Server" in output
    assert output.endswith("\ns\n")


def test_exit_status_is_that_of_the_command(tmp_path: Path) -> None:
    assert run("exit 7", tmp_path)[0] == 7
    assert run("kill -9 $$", tmp_path)[0] == 128 + 9


def test_guest_is_ended_after_its_time_limit_and_says_what_it_runs(tmp_path: Path) -> None:
    seconds, busy = round(10 * patience()), tmp_path / "busy"
    command = f"echo begun; until [ -e {busy} ]; do sleep 0.2; done; while :; do :; done"
    # It is asked in its last five seconds, and costs this machine a processor while it is busy.
    later = threading.Timer(seconds - 8, busy.touch)
    later.start()
    status, output = run(command, tmp_path, seconds=seconds)
    later.join()
    assert status == 124
    assert "begun" in output
    assert "comm: sh" in output


def test_a_kernel_that_panics_says_why(tmp_path: Path) -> None:
    status, output = run("echo c > /proc/sysrq-trigger; sleep 60", tmp_path)
    assert status == 125
    assert "Kernel panic - not syncing: sysrq triggered crash" in output


def test_guest_that_is_ended_early_leaves_nothing(tmp_path: Path) -> None:
    """Its kernel is recognised by its directory."""
    command, environment = ["sh", "-c", "echo begun; sleep 600"], {"TMPDIR": str(tmp_path)}
    with Guest(command, tmp_path / "log", share=tmp_path, environment=environment) as guest:
        while "begun" not in guest.output:
            time.sleep(0.1)
        assert processes_that_name(tmp_path)
    assert processes_that_name(tmp_path) == []
    assert list(tmp_path.iterdir()) == [tmp_path / "log"]


def processes_that_name(path: Path) -> list[str]:
    """The command lines with *path* in them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # It has ended.
            found.append(file.read_text(errors="replace").replace("\0", " "))
    return [line for line in found if str(path) in line]


def test_only_the_shared_directory_keeps_changes(tmp_path: Path) -> None:
    elsewhere = Path("/var/tmp") / f"kproxy-guest-{uuid.uuid4()}"
    status, output = run(
        f"echo kept > {tmp_path}/kept; echo lost > {elsewhere} && cat {elsewhere}", tmp_path
    )
    assert status == 0, output
    assert "lost" in output
    assert (tmp_path / "kept").read_text() == "kept\n"
    assert not elsewhere.exists()


def test_usage_is_printed_without_a_command() -> None:
    done = subprocess.run([RUN], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "COMMAND" in done.stdout

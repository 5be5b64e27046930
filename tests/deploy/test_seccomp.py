"""The seccomp profiles allow what kproxy and the programs that it runs need, and little else."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.core.bpf_places import new_bpf_file_system, new_cgroup
from tests.deploy import seccomp
from tests.deploy.objects import DEPLOY
from tests.guest.checks import Problems, names_of, play
from tests.patience import PATIENCE
from tests.shortage.node import Node, node, vip

BASE, WITH_BPF = (DEPLOY / "seccomp" / f"{name}.json" for name in ("kproxy", "kproxy-ebpf"))
NEVER = {
    "add_key", "bpf", "chroot", "delete_module", "finit_module", "init_module", "io_uring_setup", "iopl",
    "ioperm", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "mount", "open_by_handle_at",
    "perf_event_open", "pidfd_getfd", "pivot_root", "process_vm_readv", "process_vm_writev", "ptrace",
    "reboot", "request_key", "setns", "settimeofday", "swapon", "umount2", "unshare", "userfaultfd",
}  # fmt: skip
"""Calls that a process with CAP_NET_ADMIN would attack a kernel with."""
MODES = ("nftables", "iptables", "userspace", "ebpf")
PIECE = 1 << 20


def names(profile: Path) -> set[str]:
    (rule,) = json.loads(profile.read_text())["syscalls"]
    assert rule["action"] == "SCMP_ACT_ALLOW"
    return set(rule["names"])


def test_nothing_is_allowed_that_is_not_listed() -> None:
    for profile in (BASE, WITH_BPF):
        found = json.loads(profile.read_text())
        assert (found["defaultAction"], found["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", 1)
        assert found["architectures"] == ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"]
    assert not names(BASE) & NEVER
    assert names(WITH_BPF) - names(BASE) == {"bpf"}


@pytest.fixture
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    """A node with everything that the ebpf mode needs."""
    with ExitStack() as stack:
        cgroup = stack.enter_context(new_cgroup())
        pins = stack.enter_context(new_bpf_file_system(tmp_path / "bpf"))
        ebpf = {"cgroup": str(cgroup), "pinDirectory": str(pins / "kproxy")}
        yield stack.enter_context(node(
            tmp_path, request.param, backend_options={"ebpf": ebpf}, own_tables="never"))


@pytest.mark.parametrize(("here", "profile"), [
    *((mode, WITH_BPF if mode == "ebpf" else BASE) for mode in MODES),
], indirect=["here"], ids=MODES)  # fmt: skip
def test_a_proxy_starts_serves_repairs_switches_and_ends(here: Node, profile: Path) -> None:
    confined: list[str | Path] = [sys.executable, seccomp.__file__, profile]
    here.serve(1)
    with here.proxy(under=confined) as proxy:
        here.await_answer(vip(1))
        with here.dial(vip(1)) as client:  # relays copy bulk data in another way
            client.settimeout(PATIENCE)
            client.sendall(bytes(PIECE // 2))
            assert client.recv(1)
        here.network.run("nft", "flush ruleset")
        here.await_log("repaired foreign changes")
        here.await_answer(vip(1))
        here.serve(2)
        here.await_answer(vip(2))
        others = [mode for mode in MODES if profile == WITH_BPF or mode != "ebpf"]
        for mode in (*others, others[0]):
            here.command("switch", mode, under=confined)
            assert here.answers(vip(1))
        here.serve(3)
        here.await_answer(vip(3))
        for port, path in ((10249, "/metrics"), (10249, "/configz"), (10256, "/livez")):
            assert proxy.get(port, path)[0] == 200
        assert proxy.end()[0] == 0
    assert "Bad system call" not in here.logged
    here.command("modes", "--probe", under=confined)
    here.command("--cleanup", under=confined)
    assert vip(1) not in here.network.run("nft", "list", "ruleset")


CHECKS = [Path(__file__).with_name("seccomp_checks.py")]


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("name", names_of(CHECKS))
def test_in_the_guest(name: str, from_guest: Problems) -> None:
    assert name in from_guest
    assert not any(from_guest[name]), "\n".join(from_guest[name])

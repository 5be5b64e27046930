"""The requirements that the probe names."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kproxy_core.contract.values import BackendSettings, Detection
from kproxy_core.model.address import Family
from kproxy_ebpf import names
from kproxy_ebpf.detect import detect
from kproxy_ebpf.kernel import bpf
from kproxy_ebpf.settings import Settings

_PROG_ATTACH = 8
_ACCEPT = struct.pack("=BBhi", 0xB7, 0, 0, 1) + struct.pack("=BBhi", 0x95, 0, 0, 0)


class _Trial:
    """The programs are tried in a child cgroup, not in another network namespace."""

    def enter(self) -> str:
        raise AssertionError


def probe(settings: Settings) -> Detection:
    options = {"cgroup": settings.cgroup, "pinDirectory": settings.pin_directory}
    return detect(BackendSettings((Family.IPV4,), options=options), _Trial())


def lacking_with(capabilities: str, settings: Settings) -> str:
    """Return what a process with these *capabilities* finds lacking; `setpriv` describes them."""
    program = (
        "from kproxy_ebpf.detect import lacking; from kproxy_ebpf.settings import Settings\n"
        f"print('; '.join(lacking({settings!r})))"
    )
    limit = ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"]
    command = [*limit, sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def unmet(found: Detection) -> list[str]:
    return [f"{one.what}: {one.found}" for one in found.requirements if not one.met]


def children(cgroup: str) -> list[str]:
    return [path.name for path in Path(cgroup).iterdir() if path.is_dir()]


def test_a_machine_that_can_run_the_programs_lacks_nothing(settings: Settings) -> None:
    assert unmet(probe(settings)) == []
    assert children(settings.cgroup) == []


def test_an_exclusive_program_is_named(settings: Settings) -> None:
    kind = names.ATTACH_TYPES["connect6"]
    program = bpf.load_program(names.PROGRAM_TYPE, kind, "device_policy", _ACCEPT)
    cgroup = os.open(settings.cgroup, os.O_RDONLY)
    try:
        bpf._call(_PROG_ATTACH, struct.pack("=IIII", cgroup, program, kind, 0))
        (problem,) = unmet(probe(settings))
        assert problem.startswith(
            "programs at a cgroup: connect6: the cgroup or an ancestor has an exclusive program: "
            f"device_policy (id {bpf.identity(program)})"
        )
        assert children(settings.cgroup) == []
    finally:
        os.close(program)
        os.close(cgroup)


@pytest.mark.parametrize(("cgroup", "problem"), [
    ("/sys/fs/cgroup/no-such-group", "does not exist"),
    ("/proc", "is not a directory of a cgroup2 file system"),
])  # fmt: skip
def test_a_wrong_cgroup_is_named(settings: Settings, cgroup: str, problem: str) -> None:
    assert f"cgroup: cgroup {cgroup} {problem}" in unmet(probe(settings._replace(cgroup=cgroup)))


def test_a_directory_outside_of_bpf_file_systems_is_named(settings: Settings) -> None:
    assert unmet(probe(settings._replace(pin_directory="/proc/kproxy"))) == []
    found = lacking_with("-all,+bpf,+net_admin", settings._replace(pin_directory="/proc/kproxy"))
    assert "BPF file system: /proc is not one. mount -t bpf bpf /proc" in found


@pytest.mark.parametrize(("allowed", "missing"), [
    ("-all,+bpf,+net_admin", ""),
    ("-all,+bpf", "BPF programs for cgroups"),
    ("-all,+net_admin", "grant CAP_BPF and CAP_NET_ADMIN"),
])  # fmt: skip
def test_a_missing_capability_is_named(settings: Settings, allowed: str, missing: str) -> None:
    found = lacking_with(allowed, settings)
    assert bool(found) is bool(missing), found
    assert missing in found

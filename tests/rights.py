"""What tests need of the machine beyond Python. The demo, the ebpf mode and tests try a right alike, once.

A test that needs one which the machine refuses is left out, and the lanes say how many a right costs. In CI
it fails.
"""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from kproxy_conformance.network.rights import MissingRight
from kproxy_conformance.network.rights import missing as missing_of_programs

_libc = ctypes.CDLL(None, use_errno=True)

CI = "CI" in os.environ
"""Every right is there, so that no hole opens unnoticed."""


def provide_run() -> None:
    """Give a root that may not write to ``/run``, as in a user namespace, one of its own for namespaces."""
    if os.geteuid() == 0 and not os.access("/run", os.W_OK):
        _libc.mount(b"tmpfs", b"/run", b"tmpfs", 0, None)


@functools.cache
def missing(right: str) -> str:
    """Return why this process lacks *right*, "" if it has it."""
    if right != "BPF":
        return missing_of_programs(right)
    from kproxy_ebpf.detect import refusal

    return refusal() or missing_of_programs("BPF file systems")


def require(*rights: str) -> None:
    """Raises MissingRight for the first of *rights* that is missing."""
    for right in rights:
        if reason := missing(right):
            raise MissingRight(right, reason)


def program(name: str) -> str:
    """Return the path of a program. Raises MissingRight."""
    if (found := shutil.which(name)) is None:
        raise MissingRight(f"the program {name}", "not installed")
    return found


def download(directory: Path, *arguments: str) -> None:
    """Download packages of the Python index to *directory*. Raises MissingRight."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps",
               "--retries=1", f"--dest={directory}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip download failed"]
        raise MissingRight("a package index", lines[-1])


_NETWORK, _MOUNT, _PROCESSES, _BPF = "network namespaces", "mount namespaces", "process namespaces", "BPF"

NEEDS: Mapping[str, tuple[str, ...]] = {
    "tests/conformance/test_conformance.py::test_scenario[ebpf": (_BPF,),
    "tests/conformance/test_evidence.py::test_a_program_that_crashes": (_NETWORK,),
    "tests/core/app/test_control.py::test_a_process_of_another_pid_namespace": (_PROCESSES,),
    "tests/core/app/test_control.py::test_a_root_user": (_NETWORK, "user namespaces", "other users"),
    "tests/core/app/test_notify.py::test_children_do_not": (_NETWORK,),
    "tests/core/cli/test_modes.py::test_other_users_see": (_NETWORK, "other users"),
    "tests/core/cli/test_terminal.py::test_probed_modes": (_NETWORK, _BPF),
    "tests/core/cli/test_terminal.py::test_without_a_terminal": (_NETWORK, _BPF),
    "tests/core/netlink/test_sockets.py::test_every_refused_request": (_NETWORK,),
    "tests/core/linux/test_trial.py": (_NETWORK, "user namespaces"),
    "tests/examples/test_contributing_page.py": (_NETWORK,),
    "tests/examples/test_debugging_page.py": (_NETWORK, _MOUNT),
    "tests/examples/test_demo.py::test_demo_finds_everything": (_NETWORK, _MOUNT),
    "tests/examples/test_ebpf_page.py": (_NETWORK, _MOUNT, _BPF),
    "tests/examples/test_modes_page.py": (_NETWORK, _MOUNT),
    "tests/examples/test_quickstart.py": (_NETWORK, _MOUNT),
    "tests/examples/test_readme.py::test_the_first_screen": (_NETWORK,),
    "tests/examples/test_standalone_page.py": (_NETWORK, _MOUNT),
    "tests/examples/test_systemd_page.py": (_NETWORK, _MOUNT),
    "tests/install": (_NETWORK, _MOUNT),
    "tests/kit/test_all_checks_can_fail.py::test_sabotage": (_NETWORK,),
    "tests/kit/test_an_installed_example.py": (_NETWORK,),
    "tests/kit/test_backends.py::test_backend[": (_NETWORK,),
    "tests/kit/test_plugin.py": (_NETWORK,),
    "tests/plugins/ebpf/test_detect.py::test_a_missing_capability": (_BPF,),
    "tests/plugins/ebpf/test_kernel.py": (_BPF,),
    "tests/plugins/iptables/test_cleanup.py::test_an_interface": (_NETWORK,),
    "tests/plugins/nftables/test_flowtable.py::test_rendered_rules_are_checked": (_NETWORK,),
    "tests/plugins/userspace/test_detect.py": (_NETWORK,),
    "tests/soak/test_soak.py": (_NETWORK, _MOUNT, _BPF),
    "tests/switch/test_switch.py::test_no_connection_is_lost[": (_NETWORK, _BPF),
    "tests/switch/test_switch.py::test_the_rules_that_ebpf_stands_on": (_NETWORK, _BPF),
}
"""What tests need that they do not try themselves, by the start of their ids: another process would."""


def needed_by(test: str) -> Iterator[str]:
    """Yield the rights that the test with this id needs, without those that its fixtures try."""
    for start, rights in NEEDS.items():
        if test.startswith(start):
            yield from rights


_PATH = os.environ.get("PATH")
_NOT_FOUND = re.compile(
    r"No such file or directory: '([\w-]+)'" r'|exec of "([\w-]+)" failed: No such'
    r"|\bsh: \d+: ([\w-]+): not found" r"|\b([\w-]+) is not installed")  # fmt: skip
"""How Python, ``ip netns exec``, a shell and kproxy report a program that they did not find."""


def refused_in(error: BaseException | None) -> MissingRight | None:
    """Return the missing right behind *error*, if that is its cause.

    So is a program that was not found, unless only the test has hidden it.
    """
    seen: set[int] = set()  # Errors may cause each other: one that is raised again from another.
    while error is not None and not isinstance(error, MissingRight):
        if id(error) in seen:
            return None
        seen.add(id(error))
        for found in _NOT_FOUND.finditer(str(error)):
            name = found[found.lastindex or 0]
            if shutil.which(name, path=_PATH) is None:
                return MissingRight(f"the program {name}", "not installed")
        error = error.__cause__ or error.__context__
    return error

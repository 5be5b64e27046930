"""What the mode finds on Linux 6.1, run by test_older_kernel.py in a guest."""

import subprocess
import sys

import pytest

_DETECT = (
    "from kproxy_ebpf.detect import lacking; from kproxy_ebpf.settings import Settings\n"
    "print('; '.join(lacking(Settings())))"
)


@pytest.mark.parametrize(("allowed", "missing"), [
    ("-all,+bpf,+net_admin,+perfmon", ""),
    ("-all,+bpf,+net_admin", "refused by the verifier. grant CAP_PERFMON"),
])  # fmt: skip
def test_a_missing_capability_is_named(allowed: str, missing: str) -> None:
    done = subprocess.run(
        ["setpriv", f"--bounding-set={allowed}", f"--inh-caps={allowed}", sys.executable, "-c", _DETECT],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert bool(done.stdout.strip()) is bool(missing), done.stdout
    assert missing in done.stdout


def test_connected_udp_is_left_to_the_rules() -> None:
    """The guest's kernel has no CONFIG_INET_DIAG_DESTROY."""
    from kproxy_core.host.netlink.udp_sockets import udp_destruction_problem

    assert udp_destruction_problem() == "the kernel has no CONFIG_INET_DIAG_DESTROY"

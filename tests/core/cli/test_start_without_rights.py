"""A start that lacks a right ends at once, in every mode, and says what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

REMEDIES = {
    "nftables": "run as root or with CAP_NET_ADMIN",
    "userspace": "or serve without portals: --userspace-listen ADDRESS",
    "iptables": "Permission denied (you must be root)",
}


@pytest.mark.parametrize("mode", REMEDIES)
def test_a_missing_right_ends_the_start(mode: str, tmp_path: Path) -> None:
    kproxy = Path(sys.executable).with_name("kproxy")
    done = subprocess.run(
        ["setpriv", "--bounding-set=-all", "--inh-caps=-all", kproxy, f"--mode={mode}", "--manifests",
         str(tmp_path)],
        capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 1
    assert REMEDIES[mode] in done.stderr.splitlines()[-1]


def test_a_cleanup_without_rights_is_one_error() -> None:
    kproxy = Path(sys.executable).with_name("kproxy")
    done = subprocess.run(
        ["setpriv", "--bounding-set=-all", "--inh-caps=-all", kproxy, "--cleanup"],
        capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: permission denied, run as root or with CAP_NET_ADMIN\n"

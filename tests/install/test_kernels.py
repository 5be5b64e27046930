"""The BPF programs of the wheel translate on another kernel, where nothing could compile them.

It is Debian 13's, as a program (User Mode Linux).
"""

from pathlib import Path

import pytest

from tests.core.namespaces import own_network
from tests.install.places import CHECKOUT, on_debian

__all__ = ["own_network"]

pytestmark = pytest.mark.usefixtures("own_network")

INIT = """#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mkdir -p /lib/modules
ln -s "/usr/lib/uml/modules/$(uname -r)" /lib/modules/
modprobe ipv6
ip link set lo up
PYTHONPATH=/tmp /opt/kproxy/bin/python /tmp/translation.py 2>&1
echo o > /proc/sysrq-trigger
sleep 60
"""
KERNEL = ("timeout", "--kill-after=5", "240", "linux.uml", "mem=512M", "rootfstype=hostfs", "rootflags=/",
          "rw", "init=/tmp/init", "uml_dir=/tmp", "loglevel=2", "con=null", "con0=null,fd:1")


def test_the_programs_of_the_wheel_translate(wheel: Path, tmp_path: Path) -> None:
    with on_debian(wheel, tmp_path / "place", suite="trixie", python="3.13", own_python=True) as place:
        assert place.system is not None
        (tmp_path / "init").write_text(INIT)
        (tmp_path / "init").chmod(0o755)
        for path in (tmp_path / "init", Path(__file__).with_name("translation.py"),
                     CHECKOUT / "conformance" / "kproxy_conformance"):
            place.put(path)
        done = place.run(*KERNEL)
    said = next((line for line in done.stdout.splitlines() if line.startswith("Linux ")), "")
    assert said.startswith("Linux 6.12."), done.stdout
    assert said.endswith(": pod at 10.96.0.1, pod at fd00:96::1"), done.stdout

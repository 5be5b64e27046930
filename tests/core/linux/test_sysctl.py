"""Kernel settings of a network namespace made for the test."""

import errno
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_core.linux import sysctl
from kproxy_core.linux.errors import HostError
from tests.core.namespaces import Namespace, namespace

CHECKOUT = Path(__file__).parents[3]
FORWARD = "net/ipv4/ip_forward"
PORTS = "net/ipv4/ip_local_port_range"


@pytest.fixture
def inside() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


def test_a_setting_is_written_only_if_it_differs(inside: Namespace) -> None:
    def act() -> list[object]:
        return [
            sysctl.read(FORWARD),
            sysctl.ensure(FORWARD, 1),
            sysctl.ensure(FORWARD, 1),
            sysctl.read(FORWARD),
            sysctl.ensure(FORWARD, "0"),
        ]

    assert inside.inside(act) == ["0", True, False, "1", True]


def test_settings_of_several_numbers_are_compared_as_such(inside: Namespace) -> None:
    assert inside.inside(lambda: sysctl.ensure(PORTS, "40000 50000"))
    assert inside.inside(lambda: sysctl.read(PORTS)) == "40000\t50000"
    assert not inside.inside(lambda: sysctl.ensure(PORTS, "40000 50000"))


def test_a_setting_that_the_kernel_lacks() -> None:
    with pytest.raises(HostError) as caught:
        sysctl.ensure("net/ipv4/no_such_setting", 1)
    assert str(caught.value) == "cannot read sysctl net/ipv4/no_such_setting: No such file or directory"
    assert caught.value.errno == errno.ENOENT


def test_a_value_that_the_kernel_refuses(inside: Namespace) -> None:
    with pytest.raises(HostError) as caught:
        inside.inside(lambda: sysctl.ensure(PORTS, "high"))
    assert str(caught.value) == f"cannot set sysctl {PORTS} to high: Invalid argument"


def test_read_only_settings_fail_only_if_they_differ(inside: Namespace) -> None:
    """As in an unprivileged container."""
    program = f"""if True:
        from kproxy_core.linux import sysctl
        from kproxy_core.linux.errors import HostError
        print(sysctl.ensure("{FORWARD}", 0))
        try:
            sysctl.ensure("{FORWARD}", 1)
        except HostError as error:
            print(error)
    """
    remount = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys"
    printed = inside.run(
        "unshare", "--mount", "sh", "-c", f'{remount} && exec "$0" -c "$1"', sys.executable, program,
        cwd=CHECKOUT,
    )
    assert printed == f"False\ncannot set sysctl {FORWARD} to 1: Read-only file system\n"

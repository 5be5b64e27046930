"""`make demo` works: it is the first thing that anybody runs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.core.namespaces import Namespace, namespace
from tests.core.other_user import as_nobody

CHECKOUT = Path(__file__).parents[2]


def test_demo_finds_everything_as_it_should_be() -> None:
    """Its exit status says so, and it leaves no namespace behind."""
    before = set(_namespaces())
    demo = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=CHECKOUT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "✗" not in demo.stdout
    for shown in (
        "ClusterIP",
        "NodePort",
        "LoadBalancer",
        "customer 198.51.100.7",
        " 0 failed",
        "partial syncs",
    ):
        assert shown in demo.stdout
    assert not {name for name in set(_namespaces()) - before if name in ("router", "customer", "bank")}


@pytest.mark.parametrize("who", ["root", "nobody"])
def test_demo_ends_without_a_traceback_when_its_reader_has_gone(who: str) -> None:
    command = [sys.executable, "-m", "examples.demo"]
    reader, writer = os.pipe()
    os.close(reader)
    with new_machine() as machine, machine.joined():
        demo = subprocess.run(
            command if who == "root" else as_nobody(*command), cwd=CHECKOUT, stdin=subprocess.DEVNULL,
            stdout=writer, stderr=subprocess.PIPE, text=True, check=False)  # fmt: skip
    os.close(writer)
    assert (demo.returncode, demo.stderr) == (141, "")


def test_demo_shows_what_needs_no_privileges() -> None:
    """Other users than root see the userspace mode instead."""
    with new_machine() as machine, machine.joined():
        demo = subprocess.run(
            as_nobody(sys.executable, "-m", "examples.demo"),
            cwd=CHECKOUT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "✗" not in demo.stdout
    for shown in ("userspace-listen", "web-a web-b web-c", "names-a", " 0 failed", "connections relayed"):
        assert shown in demo.stdout


@contextmanager
def new_machine() -> Iterator[Namespace]:
    """Yield a namespace in which nothing else takes the demo's ports."""
    with namespace() as machine:
        machine.ip("link add out type veth peer name nowhere", "link set out up",
                   "address add 192.0.2.10/24 dev out")
        yield machine


def _namespaces() -> list[str]:
    names = Path("/run/netns")
    return [path.name for path in names.iterdir()] if names.exists() else []

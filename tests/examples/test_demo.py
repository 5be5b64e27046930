"""`make demo` works: it is the first thing that anybody runs."""

import subprocess
import sys
from pathlib import Path

from tests.core.namespaces import namespace
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


def test_demo_shows_what_needs_no_privileges() -> None:
    """Other users than root see the userspace mode instead."""
    with namespace() as machine:  # Nothing else takes its ports.
        machine.ip("link add out type veth peer name nowhere", "link set out up",
                   "address add 192.0.2.10/24 dev out")
        with machine.joined():
            demo = subprocess.run(
                as_nobody(sys.executable, "-m", "examples.demo"),
                cwd=CHECKOUT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "✗" not in demo.stdout
    for shown in ("userspace-listen", "web-a web-b web-c", "names-a", " 0 failed", "connections relayed"):
        assert shown in demo.stdout


def _namespaces() -> list[str]:
    names = Path("/run/netns")
    return [path.name for path in names.iterdir()] if names.exists() else []

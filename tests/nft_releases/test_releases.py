"""The two releases of nft run here, and differ in what makes us run them."""

import signal

import pytest

from tests.core.namespaces import own_network
from tests.nft_releases.releases import BOOKWORM, RELEASES, TRIXIE, Release

__all__ = ["own_network"]

pytestmark = pytest.mark.usefixtures("own_network")

LIST = """
import nftables
print(nftables.Nftables().cmd("list tables"))
"""


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_nft_and_its_python_binding_work_in_the_network_namespace_of_the_test(release: Release) -> None:
    assert release.run("--version").stdout.startswith(f"nftables v{release.version} ")
    assert release.run("-f", "-", stdin="table ip here { chain c { tcp dport 80 accept; }; }").returncode == 0
    assert "tcp dport 80 accept" in release.run("list", "table", "ip", "here").stdout
    done = release.run_python(LIST)
    assert done.stdout == "(0, 'table ip here\\n', '')\n", done.stderr


def test_the_older_one_dies_of_a_set_that_the_newer_one_makes() -> None:
    assert TRIXIE.run("-f", "-", stdin="table ip foreign { set s { type ifname; }; }").returncode == 0
    assert TRIXIE.run("list", "tables").stdout == "table ip foreign\n"
    assert BOOKWORM.run("list", "tables").returncode == -signal.SIGSEGV

"""Probing and choosing on a kernel that has its modules still to load, and no NAT for nf_tables: Debian's."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.guest.guest import Guest

KPROXY = Path(sys.executable).with_name("kproxy")
DEBIAN = {"GUEST_MODULES": "/usr/lib/uml/modules"}

SCRIPT = """
cd {directory}
update-alternatives --set iptables /usr/sbin/iptables-legacy
update-alternatives --set ip6tables /usr/sbin/ip6tables-legacy
modules() {{ cut -d' ' -f1 /proc/modules | sort; }}
probe() {{ name=$1; shift; status=0; {kproxy} modes --probe -o json "$@" > $name.json || status=$?
          echo $status > $name.status; modules > $name.modules; }}
modules > before.modules
probe looked
probe looked-ipvs ipvs
probe loaded ipvs --load-modules
probe refused nftables --load-modules
mkdir manifests
{kproxy} --mode=nftables --manifests=manifests --hostname-override=node1 2> kproxy.log &
until curl -sf http://127.0.0.1:10256/healthz; do sleep 0.2; done
curl -si http://127.0.0.1:10249/proxyMode > proxy-mode
curl -s http://127.0.0.1:10249/metrics > metrics
kill $!
wait $!
{kproxy} --mode=nftables --mode-fallback=never --manifests=manifests --hostname-override=node1 2> never.log
echo $? > never.status
"""


def play(items: Sequence[pytest.Item], directory: Path) -> Path:
    """The directory with all that happened in one guest."""
    script = SCRIPT.format(directory=directory, kproxy=KPROXY)
    command, log = ["sh", "-c", script], directory / "guest.log"
    with Guest(command, log, share=directory, environment=DEBIAN) as guest:
        assert guest.status() == 0, guest.output
    return directory


pytestmark = pytest.mark.in_a_guest(play=play)


@pytest.fixture
def seen(from_guest: Path) -> Path:
    return from_guest


def read(path: Path) -> str:
    return path.read_text().strip()


def mode(seen: Path, name: str, wanted: str) -> dict[str, Any]:
    """Return the result for one mode of one probe."""
    (found,) = [m for m in json.loads((seen / f"{name}.json").read_text())["modes"] if m["mode"] == wanted]
    assert isinstance(found, dict)
    return found


def test_probing_loads_nothing_and_says_that_it_guesses(seen: Path) -> None:
    assert read(seen / "looked.modules") == read(seen / "before.modules")
    assert read(seen / "looked-ipvs.modules") == read(seen / "before.modules")
    guesses = {r["what"]: r for r in mode(seen, "looked", "ipvs")["requirements"] if r["guessed"]}
    servers = guesses["IPv4: virtual server with scheduler rr"]
    assert servers["met"]
    assert "not tried, that would load ip_vs, ip_vs_rr and nf_conntrack" in servers["found"]
    assert read(seen / "looked-ipvs.status") == "0"


def test_with_modules_loaded_the_real_thing_is_tried(seen: Path) -> None:
    found = mode(seen, "loaded", "ipvs")
    assert found["usable"]
    assert not [r for r in found["requirements"] if r["guessed"]]
    assert {"ip_vs", "ip_vs_rr", "xt_set", "dummy"} <= set(read(seen / "loaded.modules").splitlines())
    assert read(seen / "loaded.status") == "0"


def test_what_the_kernel_lacks_is_found_by_trying(seen: Path) -> None:
    missing = {r["what"]: r for r in mode(seen, "refused", "nftables")["requirements"] if not r["met"]}
    nat = missing["ip: chains of type nat"]
    assert not nat["guessed"]
    assert "CONFIG_NFT_NAT" in nat["remedy"]
    assert read(seen / "refused.status") == "1"


def test_nftables_falls_back_to_iptables(seen: Path) -> None:
    head, _, body = (seen / "proxy-mode").read_text().partition("\n\n")
    assert body == "iptables"
    assert "Kproxy-Mode-Wanted: nftables" in head
    assert "no chains of type nat in family ip" in head
    assert 'kproxy_mode_fallback{serving="iptables",wanted="nftables"} 1' in (seen / "metrics").read_text()
    assert "falling back to another mode" in (seen / "kproxy.log").read_text()


def test_never_ends_with_the_reason(seen: Path) -> None:
    assert read(seen / "never.status") == "1"
    assert "mode nftables does not work on this machine: no chains of type nat" in read(seen / "never.log")

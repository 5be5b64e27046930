"""``kubectl kproxy`` in a cluster of three nodes with running proxies."""

import io
import json
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kproxy_core.observe.traffic.recorder import FRESH
from tests.fleet.fleet import NODES, Fleet, kproxy_pod

REJECTING = """
table ip rejecting {
    chain out {
        type filter hook output priority -200
        ip daddr 10.96.0.10 tcp flags syn reject with tcp reset
    }
}
"""


def test_every_node_is_listed_with_its_mode(fleet: Fleet) -> None:
    done = fleet.kubectl("status")
    assert done.returncode == 0, done.stderr
    head, *rows, last = done.stdout.splitlines()
    assert head.split()[:4] == ["NODE", "STATE", "FOR", "MODE"]
    assert [row.split()[:2] for row in rows] == [[node, "well"] for node in NODES]
    assert all(" nftables " in row for row in rows)
    assert last == "3 of 3 nodes are well"
    assert done.stderr == ""


def test_a_node_without_a_proxy_comes_first(fleet: Fleet) -> None:
    fleet.delete(kproxy_pod("node-c"))
    try:
        done = fleet.kubectl("status", "-o", "json")
    finally:
        fleet.apply(kproxy_pod("node-c"))
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [node["node"] for node in found["nodes"]] == ["node-c", "node-a", "node-b"]
    assert found["nodes"][0]["problems"] == [
        "no pod with k8s-app=kproxy in namespace kube-system runs here"]
    assert found["nodes"][1]["foreign_changes"] == 0


@contextmanager
def rejected(fleet: Fleet, node: str) -> Iterator[None]:
    """Refuse connections from *node* to the Service, by another program's rules."""
    fleet.nodes[node].nft(REJECTING)
    try:
        yield
    finally:
        fleet.nodes[node].nft("delete table ip rejecting")


def test_connections_that_fail_from_one_node_are_told(fleet: Fleet) -> None:
    with rejected(fleet, "node-b"):
        done = fleet.kubectl("verify", "--traffic")
        agreed = fleet.kubectl("diff")
    assert done.returncode == 1
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert rows[:3] == [
        "FRONTEND SERVICE PORT node-b TOTAL", "10.96.0.10:80 shop/web x 1", "TOTAL 1 1"]
    assert rows[4].startswith("10.96.0.10:80 from node-b: no connection of ")
    assert rows[-1].startswith("2 of 3 pairs of node and frontend do what the plans say, from the node")
    # The rules of kproxy are as they should be: that is what `diff` compares.
    assert (agreed.returncode, agreed.stdout) == (0, "3 of 3 nodes do what their plans say\n")


def test_traffic_is_summed_over_the_nodes(fleet: Fleet) -> None:
    def counted() -> int:
        time.sleep(FRESH)  # so old may the counts be that a node tells
        found = json.loads(fleet.kubectl("top", "-o", "json").stdout)
        assert [row["service_port"] for row in found["services"]] == ["shop/web"]
        return int(found["services"][0]["forwarded"])

    before = counted()
    for node in NODES:
        fleet.connect(node, "10.96.0.10", 80)
    assert counted() == before + 3


def test_an_archive_of_a_node_is_kproxys_own(fleet: Fleet, tmp_path: Path) -> None:
    place = tmp_path / "reports.tar"
    done = fleet.kubectl("report", str(place), "--nodes", "pool=blue")
    assert (done.returncode, done.stdout) == (0, f"{place}: 1 of 1 nodes\n")
    with tarfile.open(place) as outer:
        (member,) = outer.getmembers()
        assert member.name == "reports/node-a.tar.gz"
        file = outer.extractfile(member)
        assert file is not None
        with tarfile.open(fileobj=io.BytesIO(file.read())) as archive:
            node = archive.extractfile("kproxy-report/node.json")
            assert node is not None
            assert json.load(node)["name"] == "node-a"

"""``kubectl kproxy status``: all nodes, those with problems first."""

import json

from tests.fleet.fleet import NODES, Fleet, kproxy_pod


def test_every_node_is_listed_with_its_mode(fleet: Fleet) -> None:
    done = fleet.kubectl("status")
    assert done.returncode == 0, done.stderr
    head, *rows, last = done.stdout.splitlines()
    assert head.split()[:4] == ["NODE", "STATE", "FOR", "MODE"]
    assert [row.split()[0] for row in rows] == list(NODES)
    assert all(" well " in row and " nftables " in row for row in rows)
    assert last == "3 of 3 nodes are well"
    assert done.stderr == ""


def test_nodes_without_a_proxy_come_first(fleet: Fleet) -> None:
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

"""``kubectl kproxy explain``: from the dialling pod to the answering one, in a cluster of three nodes."""

import json
import time
from datetime import UTC, datetime, timedelta

from kproxy_conformance.apiserver.store import Json
from tests.core.processes import KPROXY
from tests.fleet.fleet import PORT, Fleet, pod_address, pod_object, service, slice_of
from tests.patience import PATIENCE

CART = "10.128.1.9"
"""The address of a pod on node-a that dials."""


def dialling_pod() -> Json:
    made = pod_object("node-a", "cart")
    made["metadata"]["labels"] = {"app": "cart"}
    made["status"] |= {"podIP": CART, "podIPs": [{"ip": CART}]}
    return made


def changed_before(obj: Json, seconds: float) -> Json:
    """Return *obj* as if its last change was *seconds* ago."""
    then = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
    return obj | {"metadata": obj["metadata"] | {"managedFields": [{"time": then}]}}


def policy(name: str, kind: str, **selector: object) -> Json:
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": name, "namespace": "shop"},
            "spec": {"podSelector": selector, "policyTypes": [kind]}}


def explained(fleet: Fleet, *words: str) -> tuple[int, Json]:
    done = fleet.kubectl("explain", *words, "-o", "json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def problems(found: Json) -> list[str]:
    return [f"{each['node']} {each['problem']}" for each in found["problems"]]


def await_slice(fleet: Fleet, node: str, piece: Json) -> None:
    """Wait until *node* serves the endpoints of an EndpointSlice."""
    meta, (port,) = piece["metadata"], piece["ports"]
    to = f"shop/{meta['labels']['kubernetes.io/service-name']}"
    wanted = {f"{each['addresses'][0]}:{port['port']}" for each in piece["endpoints"]}
    deadline = time.monotonic() + PATIENCE
    while True:
        answer = fleet.nodes[node].run("sh", "-c", f"{KPROXY} explain pod {to} -o json || echo null")
        packets = (json.loads(answer) or {"packets": []})["packets"]
        known = {each["endpoint"] for packet in packets for known in packet["slices"]
                 if known["name"] == meta["name"] for each in known["endpoints"]}
        if known == wanted and all(packet["kernel"]["verdict"] == "agrees" for packet in packets):
            return
        assert time.monotonic() < deadline, f"{node}: {packets}"


def test_the_way_from_a_pod_to_an_endpoint_on_another_node_is_told_with_its_policies(fleet: Fleet) -> None:
    db = slice_of("db", ["node-b"])
    db["endpoints"][0]["targetRef"]["name"] = "web-node-b"
    objects = [
        dialling_pod(), db,
        service("db", "10.96.0.20", type="NodePort", externalTrafficPolicy="Local", selector={"app": "web"},
                ports=[{"port": 80, "nodePort": 30020}]),
        policy("web-from-carts", "Ingress", matchLabels={"app": "web"}),
        policy("carts-may-dial", "Egress", matchExpressions=[
            {"key": "app", "operator": "In", "values": ["cart"]}]),
        policy("carts-from-none", "Ingress", matchLabels={"app": "cart"}),
    ]
    for obj in objects:
        fleet.apply(obj)
    try:
        for node in fleet.nodes:
            await_slice(fleet, node, db)
        status, found = explained(fleet, "cart", "db", "--namespace=shop")
        fleet.server.refused.add(("list", "networkpolicies"))
        status_without, without = explained(fleet, CART, "10.96.0.20:80")
        outside = fleet.kubectl("explain", "outside", "shop/db")
    finally:
        fleet.server.refused.clear()
        for obj in objects:
            fleet.delete(obj)
    assert (status, found["problems"], found["from"]) == (0, [], "pod shop/cart on node node-a")
    (way,) = found["ways"]
    assert (way["nodes"], way["to"], way["outcome"]) == (["node-a"], "10.96.0.20:80", "forwarded")
    assert way["endpoints"] == [{
        "endpoint": f"{pod_address('node-b')}:{PORT}", "share": 1.0, "masqueraded": False,
        "pod": "shop/web-node-b", "node": "node-b", "there": "ready", "policies": ["web-from-carts"]}]
    assert found["egress_policies"] == ["carts-may-dial"]
    assert (status_without, without["ways"][0]["endpoints"][0]["policies"]) == (0, [])
    assert without["from"] == found["from"]
    assert "you need the verb 'list' on 'networkpolicies' in namespace shop" in without["policies_problem"]
    lines = outside.stdout.splitlines()
    assert (outside.returncode, lines[0]) == (0, "from outside to shop/db")
    avoided = lines.index("at node-a, node-c: 10.9.0.11:30020/TCP, node port of shop/db")
    assert lines[avoided + 1].startswith("  outcome     dropped: external traffic policy Local")
    assert "at node-b: 10.9.0.12:30020/TCP, node port of shop/db" in lines


def test_a_node_that_has_not_been_told_of_changes_is_named_with_their_age(fleet: Fleet) -> None:
    first, second = slice_of(nodes=["node-a"]), slice_of(nodes=["node-c"])
    second["metadata"] |= {"name": "web-2", "creationTimestamp": "2026-01-01T00:00:00Z"}
    new = service("new", "10.96.0.30")
    with fleet.stalled("node-b"):
        for obj in (changed_before(first, 60), second, changed_before(new, 60)):
            fleet.apply(obj)
        for piece in (first, second):
            await_slice(fleet, "node-a", piece)
        status, found = explained(fleet, "node-b", "shop/web")
        unknown_status, unknown = explained(fleet, "node-b", "shop/new")
    fleet.delete(second)
    fleet.delete(new)
    fleet.apply(slice_of())
    for node in fleet.nodes:
        await_slice(fleet, node, slice_of())
    assert (status, problems(found)) == (1, [
        "node-b knows an older EndpointSlice web-1: with 10.128.2.2:8080, which was removed,"
        " with 10.128.3.2:8080, which was removed",
        "node-b does not know EndpointSlice web-2 (1 endpoint)"])
    assert [each["lags"] for each in found["problems"]] == [True, True]
    older, missing = (each["seconds"] for each in found["problems"])
    assert 55 <= older < 60 + 2 * PATIENCE
    assert missing > 24 * 3600
    assert (unknown_status, problems(unknown)[1:]) == (1, [
        "node-b does not know that 10.96.0.30:80/TCP is of Service shop/new"])


def test_a_probe_of_the_sender_s_node_finds_endpoints_that_refuse(fleet: Fleet) -> None:
    await_slice(fleet, "node-b", slice_of())
    status, found = explained(fleet, "node-b", "shop/web", "--probe")
    assert (status, found["problems"]) == (0, [])
    (probe,) = found["probes"]
    assert (probe["node"], probe["findings"], probe["unclear"]) == ("node-b", [], [])
    assert probe["source"]
    wrong = slice_of()
    wrong["ports"][0]["port"] = PORT + 1
    fleet.apply(wrong)
    try:
        await_slice(fleet, "node-b", wrong)
        status, found = explained(fleet, "node-b", "shop/web", "--probe")
        outside = fleet.kubectl("explain", "outside", "shop/web", "--probe")
    finally:
        fleet.apply(slice_of())
        await_slice(fleet, "node-b", slice_of())
    assert status == 1
    assert {problem for problem in problems(found) if " probe: " in problem} == {
        f"node-b probe: {pod_address(node)}:{PORT + 1} refuses connections: no process of the pod listens at "
        "that port, or a filter rejects them; compare the targetPort of the Service with the container"
        for node in fleet.nodes}
    assert outside.returncode == 2
    assert "--probe sends from a node, or from a pod on it: outside is neither" in outside.stderr

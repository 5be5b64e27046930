"""``kubectl kproxy explain`` where the answer is soon given, or cannot be."""

import json
from typing import Any

import pytest

from tests.core.fleet.answered_packets import says
from tests.core.fleet.test_explain import BOTH, WEB
from tests.fleet.canned import Canned
from tests.fleet.fleet import Json, service


def pod(name: str, node: str, address: str, phase: str = "Running") -> Json:
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop"},
        "spec": {"nodeName": node}, "status": {"phase": phase, "podIP": address},
    }  # fmt: skip


def packets(node: str, to: str, sender: str) -> Any:
    return {"packets": says(node, to, sender, WEB, BOTH, version="1").packets}


@pytest.fixture
def cluster(canned: Canned) -> Canned:
    """Two nodes, and an endpoint on each; node b does not answer."""
    canned.answer("a", packets("a", "10.96.0.1:80", "10.1.1.9"))
    canned.node("b", "echo 'Error: no kproxy runs in this network namespace' >&2; exit 1")
    for obj in (pod("cart", "a", "10.1.1.9"), pod("new", "", ""), pod("starting", "a", ""),
                pod("done", "a", "10.1.1.8", "Succeeded"), service("headless", "None")):
        canned.server.store.apply(obj)
    return canned


def test_an_endpoint_s_node_that_does_not_answer_is_a_problem(cluster: Canned) -> None:
    done = cluster.kubectl("explain", "shop/cart", "10.96.0.1:80", "-o", "json")
    assert done.return_value == 1
    found = json.loads(done.output)
    assert found["problems"][-1] == {
        "node": "b", "problem": "no kproxy runs in this network namespace", "lags": False, "seconds": None}
    assert [row["endpoint"] for row in found["ways"][0]["endpoints"]] == ["10.1.1.1:8080", "10.1.2.1:8080"]


def test_a_service_that_the_api_server_does_not_have_is_an_old_one(cluster: Canned) -> None:
    done = cluster.kubectl("explain", "a", "10.96.0.1:80")
    assert done.return_value == 1
    assert done.output.splitlines()[1] == (
        "  a: still serves Service shop/web, which the API server does not have (changed at an unknown time)")


NO_ANSWER = {
    "cart web": "'cart' is neither a pod in namespace default nor a node",
    "shop/none shop/web": "'shop/none' is neither a pod in namespace shop nor a node",
    "shop/new shop/web": "pod shop/new has no address yet",
    "shop/starting shop/web": "pod shop/starting has no address yet",
    "shop/done shop/web": "pod shop/done has ended",
    "Pod_1 shop/web": "'Pod_1' is no sender: give [NAMESPACE/]POD, NODE, ADDRESS or outside",
    "shop/cart [fd00::1]:80": "pod shop/cart on node a has no IPv6 address",
    "shop/cart shop/headless": "Service shop/headless has no ClusterIP, or belongs to another service proxy:"
                               " kproxy does not touch its packets",
    "shop/cart 10.96.0.1:http": "'10.96.0.1:http' is not a target",
}


@pytest.mark.parametrize("words", NO_ANSWER)
def test_a_question_without_an_answer_says_why(cluster: Canned, words: str) -> None:
    done = cluster.kubectl("explain", *words.split())
    assert str(done.exception).startswith(NO_ANSWER[words])
    assert cluster.asked == []


@pytest.mark.parametrize("resource", ["services", "endpointslices", "nodes"])
def test_a_refusal_without_which_there_is_no_answer_names_the_verb(cluster: Canned, resource: str) -> None:
    cluster.server.store.apply(service("web", "10.96.0.1"))
    cluster.server.refused.add(("list", resource))
    done = cluster.kubectl("explain", "shop/cart", "shop/web")
    assert f"you need the verb 'list' on {resource!r}" in str(done.exception)


def test_policies_that_are_refused_are_said_with_the_answer(cluster: Canned) -> None:
    cluster.server.store.apply(service("web", "10.96.0.1", selector={"app": "web"}))
    cluster.server.refused.add(("list", "networkpolicies"))
    found = json.loads(cluster.kubectl("explain", "outside", "shop/web", "-o", "json").output)
    assert "'networkpolicies' in namespace shop" in found["policies_problem"]
    assert found["ways"][0]["outcome"] == "forwarded"


def test_proxies_may_be_in_another_namespace_than_the_objects(cluster: Canned) -> None:
    done = cluster.kubectl("explain", "cart", "10.96.0.1:80", "-n", "shop", "--kproxy-namespace=elsewhere")
    assert done.output.splitlines()[1] == "  a: no pod with k8s-app=kproxy in namespace elsewhere runs here"

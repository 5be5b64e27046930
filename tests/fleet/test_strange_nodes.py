"""A node that answers strangely, or not at all, is named with its problem, and the others are shown."""

import json
from pathlib import Path

import pytest

from kproxy_core import __version__
from kproxy_core.app.replies import ProxyStatus
from kproxy_core.fleet.answers import decode
from kproxy_core.fleet.cluster import Cluster
from kproxy_core.fleet.errors import Unreached
from tests.core.api_servers import TLS, server_tls, write_kubeconfig
from tests.fleet.canned import STATUS, Canned

ANSWER = json.dumps(STATUS).replace('"', r"\"")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("", "failed to exec in container: kproxy: No such file or directory"),
        ("exit 3", "no answer, exit status 3"),
        ("echo 'Error: no kproxy runs in this network namespace' >&2; exit 1",
         "no kproxy runs in this network namespace"),
        ("printf 'Usage: kproxy\\n\\nError: No such command \\047status\\047.\\n' >&2; exit 1",
         f"its kproxy is older than this one, {__version__}: No such command 'status'."),
        ("echo hello", "its answer is not JSON: hello"),
        (r"printf '\033]0;gotcha\007'", r"its answer is not JSON: \x1b]0;gotcha\x07"),
        ("echo '[1]'", f"its kproxy answers as another version than this one, {__version__}: "
                       "Expected `object`, got `array`"),
        ("echo '{\"mode\": \"nftables\"}'", f"its kproxy answers as another version than this one, "
                                            f"{__version__}: Object missing required field `configured`"),
        ("head -c 100000 /dev/zero | tr '\\0' '['", f"its answer is not JSON: {'[' * 100}"),
        ("kill -9 $$", "no answer, exit status 137"),
    ],
)
def test_the_problem_is_named(canned: Canned, script: str, problem: str) -> None:
    canned.answer("good", STATUS)
    canned.node("strange", script)
    done = canned.kubectl("status", "-o", "json")
    assert done.return_value == 1
    first, second = json.loads(done.output)["nodes"]
    assert first == {"node": "strange", "ready": True, "well": False, "problems": [problem]}
    assert (second["node"], second["well"]) == ("good", True)


def test_a_command_that_hangs_is_given_up(canned: Canned) -> None:
    canned.node("slow", "exec sleep 1000")
    found = Cluster(canned.kubeconfig)
    with pytest.raises(Unreached, match=r"^slow: no answer within 0.3 s$"):
        found.ask(found.nodes()[0], ["kproxy", "status"], timeout=0.3)


def test_endless_output_is_given_up(canned: Canned) -> None:
    canned.node("loud", "exec yes")
    found = Cluster(canned.kubeconfig)
    with pytest.raises(Unreached, match=r"^loud: printed more than 1 MiB$"):
        found.ask(found.nodes()[0], ["kproxy", "status"], longest=1 << 20)


def test_long_texts_are_cut(canned: Canned) -> None:
    canned.answer("node", {**STATUS, "well": False, "problems": ["x" * 100_000]})
    assert f" {'x' * 500}...\n" in canned.kubectl("status").output


def test_lines_are_passed_on_as_they_come(canned: Canned) -> None:
    canned.node("node", r"echo one; printf 't\033wo\nthree'; echo problem >&2; exit 4")
    lines: list[str] = []
    found = Cluster(canned.kubeconfig)
    reply = found.ask(found.nodes()[0], ["kproxy", "switch", "iptables"], on_line=lines.append)
    assert lines == ["one", r"t\x1bwo"]
    assert (reply.status, reply.stdout, reply.stderr) == (4, b"one\nt\x1bwo\nthree", "problem")
    assert canned.asked == ["kproxy switch iptables"]


WAITING = {"name": "kproxy", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m"}}}


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ({"containerStatuses": [WAITING]}, "pod kproxy-node: CrashLoopBackOff: back-off 5m"),
        ({"phase": "Pending", "containerStatuses": []}, "pod kproxy-node: Pending"),
        ({"phase": "Failed", "reason": "Evicted", "containerStatuses": []}, "pod kproxy-node: Evicted"),
    ],
)
def test_a_pod_that_does_not_run_is_not_asked(
    canned: Canned, status: dict[str, object], problem: str
) -> None:
    canned.node("node", pod=status)
    done = canned.kubectl("status")
    assert done.return_value == 1
    assert "no kproxy" in done.output
    assert problem in done.output
    assert not canned.asked


def test_the_older_of_two_pods_that_run_is_asked(canned: Canned) -> None:
    """The newer one stands by until the older one has ended."""
    canned.node("node")
    canned.pod("node", "old", "2025-12-01T00:00:00Z")
    canned.pod("node", "older", "2025-11-01T00:00:00Z", containerStatuses=[WAITING])
    canned.pod("node", "new", "2026-02-01T00:00:00Z")
    (node,) = Cluster(canned.kubeconfig).nodes()
    assert (node.pod, node.namespace, node.container) == ("old", "kube-system", "kproxy")


def test_a_node_that_is_not_ready_is_told(canned: Canned) -> None:
    canned.node("node", "echo 'Error: no kproxy runs' >&2", ready="Unknown")
    assert "the node is not Ready; no kproxy runs" in canned.kubectl("status").output


@pytest.mark.parametrize(
    ("verb", "resource", "namespace"),
    [("list", "nodes", ""), ("list", "pods", "kube-system"), ("get", "pods/exec", "kube-system"),
     ("create", "pods/exec", "kube-system")],
)
def test_what_rbac_refuses_is_named(canned: Canned, verb: str, resource: str, namespace: str) -> None:
    canned.answer("node", STATUS)
    canned.server.refused.add((verb, resource))
    done = canned.kubectl("status")
    where = f" in namespace {namespace}" if namespace else ""
    assert str(done.exception).startswith(
        f"the API server refuses this: you need the verb '{verb}' on '{resource}'{where}; ")


def test_a_cluster_that_cannot_be_used_is_said_in_one_line(canned: Canned) -> None:
    canned.server.stop()
    assert "the API server at http://127.0.0.1:" in str(canned.kubectl("status").exception)
    assert "cannot be used" in str(canned.kubectl("status", "--context", "other").exception)


def test_commands_run_over_tls_too(canned: Canned, tmp_path: Path) -> None:
    canned.answer("node", {**STATUS, "problems": ["x" * 100_000]})
    canned.node("slow", "exec sleep 1000")
    canned.server.socket = server_tls().wrap_socket(canned.server.socket, server_side=True)
    kubeconfig = write_kubeconfig(
        tmp_path / "tls", f"https://127.0.0.1:{canned.server.port}",
        {"certificate-authority": str(TLS / "ca.crt")}, {"token": "secret"})
    found = Cluster(kubeconfig)
    fast, slow = found.nodes()
    assert decode(fast, found.ask(fast, ["kproxy", "status"]), ProxyStatus).problems == ["x" * 100_000]
    with pytest.raises(Unreached, match=r"^slow: no answer within 0.3 s$"):
        found.ask(slow, ["kproxy", "status"], timeout=0.3)

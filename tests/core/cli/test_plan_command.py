"""``kproxy plan``: the changes that other objects or another mode would make."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.core.cli.test_cli import WEB, manifests, node
from tests.core.namespaces import Namespace
from tests.core.processes import KPROXY, running

__all__ = ["manifests", "node"]


def planned(node: Namespace, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node.run(KPROXY, "plan", "-o", "json", *words))
    return found


def test_other_objects_are_compared_with_the_running_proxy(
    node: Namespace, manifests: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(manifests, other)
    (other / "web.yaml").write_text(WEB.replace("10.1.2.3", "10.1.2.4"))
    (other / "new.yaml").write_text(WEB.replace("web", "new").replace("10.96.0.10", "10.96.0.11"))
    with running(node, "--mode=nftables", f"--manifests={manifests}") as proxy:
        proxy.await_health()
        before = node.run("nft", "list", "ruleset")
        same = planned(node, str(manifests))
        assert (same["mode"], same["serving"], same["services"]) == ("nftables", "nftables", [])
        assert all(family == {"family": family["family"], "operations": 0} for family in same["kernel"])
        found = planned(node, str(other), "-v")
        assert [(each["change"], each["service_port"]) for each in found["services"]] == [
            ("gained", "shop/new"), ("changed", "shop/web")]
        assert found["services"][1]["details"] == [
            "endpoint 10.1.2.3:8080 removed", "endpoint 10.1.2.4:8080 added"]
        ipv4 = found["kernel"][0]
        assert ipv4["operations"] > 0
        assert "10.96.0.11 . 80 . 0 : 10.1.2.3 . 8080" in ipv4["transaction"]
        switched = planned(node, str(manifests), "--mode=iptables")
        assert (switched["mode"], switched["serving"]) == ("iptables", "nftables")
        assert switched["kernel"][0]["operations"] > 0
        checked = json.loads(subprocess.run(
            ["ip", "netns", "exec", node.name, KPROXY, "switch", "--check", "iptables", "-o", "json"],
            capture_output=True, text=True, check=False,
        ).stdout)  # fmt: skip
        assert checked["kernel"] == switched["kernel"]
        assert node.run("nft", "list", "ruleset") == before


def test_without_a_proxy_objects_are_compared_with_the_kernel(
    node: Namespace, manifests: Path
) -> None:
    flags = ("--mode=iptables", f"--manifests={manifests}")
    (change,) = planned(node, *flags)["services"]
    assert (change["change"], change["service_port"]) == ("gained", "shop/web")
    with running(node, *flags) as proxy:
        proxy.await_health()
    assert planned(node, *flags)["services"] == []
    (manifests / "web.yaml").unlink()
    (change,) = planned(node, *flags)["services"]
    assert (change["change"], change["details"]) == ("lost", ["frontend 10.96.0.10:80/TCP"])


def test_services_that_later_versions_stop_serving_are_named(node: Namespace, manifests: Path) -> None:
    flags = ("--mode=iptables", f"--manifests={manifests}")
    assert planned(node, *flags)["ending"] == []
    (manifests / "web.yaml").write_text(WEB.replace("10.96.0.10,", "10.96.0.10, externalIPs: [192.0.2.77],"))
    assert planned(node, *flags)["ending"] == [{
        "service": "shop/web", "path": "spec.externalIPs", "gate": "AllowServiceExternalIPs",
        "off_by_default": "1.40", "removed": "1.43", "addresses": ["192.0.2.77"],
    }]  # fmt: skip
    text = node.run(KPROXY, "plan", *flags)
    assert (
        "spec.externalIPs is deprecated: kube-proxy 1.40 will not serve it by default, 1.43 not at all; "
        "kproxy does while the feature gate AllowServiceExternalIPs is on\nending shop/web: 192.0.2.77\n"
    ) in text
    off = planned(node, *flags, "--feature-gates=AllowServiceExternalIPs=false")
    assert (off["ending"], [change["service_port"] for change in off["services"]]) == ([], ["shop/web"])


def test_a_failed_plan_is_reported_in_a_line(node: Namespace) -> None:
    done = subprocess.run([KPROXY, "plan"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give DIR, KUBECONFIG" in done.stderr

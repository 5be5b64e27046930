"""``kproxy modes``: what is listed, what a probe says and leaves, and how it ends."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.core.contract.test_registry import plugin
from tests.core.installed_plugins import install
from tests.core.namespaces import Namespace, namespace
from tests.core.other_user import as_nobody
from tests.core.processes import KPROXY, kproxy


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


def requirements(document: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    (found,) = [described for described in document["modes"] if described["mode"] == mode]
    probed: list[dict[str, Any]] = found["requirements"]
    return probed


def test_modes_are_listed_as_text_json_and_yaml() -> None:
    (listed,) = [line for line in kproxy("modes").stdout.splitlines() if line.startswith("nftables ")]
    document = json.loads(kproxy("modes", "-o", "json").stdout)
    assert yaml.safe_load(kproxy("modes", "-o", "yaml").stdout) == document
    (found,) = [described for described in document["modes"] if described["mode"] == "nftables"]
    assert found["summary"] in listed
    assert found["fallback"] == ["iptables", "userspace"]
    assert "usable" not in found


def test_a_probe_reports_its_findings_and_leaves_nothing(node: Namespace) -> None:
    """Its status is 0 if one of the modes works."""
    document = json.loads(node.run(KPROXY, "modes", "--probe", "-o", "json"))
    for mode in ("nftables", "iptables", "userspace"):
        found = requirements(document, mode)
        assert all(requirement["met"] and requirement["found"] for requirement in found)
    tried = {r["what"]: r["guessed"] for r in requirements(document, "nftables")}
    assert not any(tried.values())
    assert {"ip6: masquerade", "ip: all rules of the mode", "Linux 5.13 or newer"} <= set(tried)
    assert "kernel" in document["machine"]
    assert document["serving"] == "nftables"
    assert node.run("nft", "list", "ruleset") == ""
    assert node.run("ipset", "list", "-name") == ""


def test_the_text_has_a_line_for_each_requirement(node: Namespace) -> None:
    lines = node.run(KPROXY, "modes", "nftables", "--probe", "-v").splitlines()
    assert lines[:2] == ["a proxy started like this would serve in mode nftables", "nftables     usable"]
    assert "machine" in lines
    assert any(line.startswith("  ok       ip: reject: works") for line in lines)
    assert not any(line.startswith("iptables ") for line in lines)


@pytest.mark.parametrize("argument", ["no", "--mode=no"])
def test_the_exit_status_depends_on_the_requested_mode(
    argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "some", {"no": "some_no"}, some_no=plugin("no", usable=False))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probed = kproxy("modes", argument, "--probe", "-v")
    assert probed.returncode == 1
    assert probed.stdout.splitlines()[:2] == [
        "a proxy started like this would not serve: no mode that it may use works here",
        "no           not usable  a kernel: one"]
    assert "  missing  a kernel: one\n           get one\n" in probed.stdout
    assert kproxy("modes", argument).returncode == 0


def test_the_mode_of_a_configuration_file_is_asked_for(tmp_path: Path, node: Namespace) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n"
        "ipvs: {scheduler: fastest}\n"
    )
    probed = kproxy("modes", "--probe", f"--config={config}", node=node)
    assert probed.returncode == 1
    assert "not usable  options: ipvs.scheduler: 'fastest': must be one of rr, wrr" in probed.stdout
    assert probed.stdout.startswith("a proxy started like this would not serve")
    assert kproxy("modes", "nftables", "--probe", f"--config={config}", node=node).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("nftable",), "no backend provides mode 'nftable'"),
        (("--load-modules",), "--load-modules requires --probe"),
        (("--probe", "--config=/no/such/file"), "can't be read"),
    ],
)
def test_a_question_without_answer_is_an_error(arguments: tuple[str, ...], problem: str) -> None:
    done = kproxy("modes", *arguments)
    assert done.returncode == 2
    assert problem in done.stderr


def test_a_plugin_that_dies_when_it_is_asked_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: Namespace
) -> None:
    dying = plugin("dying").replace("return Detection", "import os; os.abort(); return Detection")
    install(tmp_path, "some", {"dying": "some_dying"}, some_dying=dying)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = kproxy("modes", "--probe", "-o", "json", node=node)
    (requirement,) = requirements(json.loads(done.stdout), "dying")
    assert requirement["found"] == "ended by signal 6"
    assert done.returncode == 0


def test_other_users_see_kernel_features_and_missing_privileges() -> None:
    done = subprocess.run(
        as_nobody(KPROXY, "modes", "--probe", "-o", "json"),
        env={**os.environ, "HOME": "/"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    document = json.loads(done.stdout)
    for mode in ("nftables", "iptables"):
        found = requirements(document, mode)
        (missing,) = [r for r in found if not r["met"] and not r["what"].startswith("sysctl")]
        assert missing["what"].startswith("CAP_NET_ADMIN")
        assert missing["remedy"].startswith("run as root or with")
        assert len(found) > 10
    assert done.returncode == 1


def test_a_plugin_that_leaves_out_arguments_is_asked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frugal = plugin("frugal").replace("def kproxy_detect(settings)", "def kproxy_detect()")
    install(tmp_path, "some", {"frugal": "some_frugal"}, some_frugal=frugal)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert kproxy("modes", "frugal", "--probe").returncode == 0


def test_a_probe_promises_nothing_over_the_network_namespace_of_another_user(node: Namespace) -> None:
    """A user namespace of its own gives all capabilities, but none over a network namespace outside."""
    for own_network in (False, True):
        command = ["ip", "netns", "exec", node.name, "unshare", "-Urn" if own_network else "-Ur",
                   KPROXY, "modes", "--probe"]
        probed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert probed.returncode == (0 if own_network else 1)
        assert ("nftables     usable" in probed.stdout.splitlines()) == own_network
        assert len(probed.stdout.splitlines()) < 12
    start = subprocess.run(
        ["unshare", "-Ur", KPROXY, "--mode=nftables", "--manifests=/"], capture_output=True, check=False)
    assert start.returncode == 1

"""``kproxy report``: one archive about a node, and ``kproxy explain`` that answers from it elsewhere."""

import json
import os
import pty
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from kproxy_core.cli.report import TOP, without_secrets
from tests.core.cli.test_cli import manifests, node
from tests.core.namespaces import Namespace
from tests.core.processes import KPROXY, running

__all__ = ["manifests", "node"]

SHOP = Path(__file__).parents[3] / "examples" / "shop"
CONFIG = Path(__file__).parents[3] / "examples" / "kproxy.yaml"

FORWARD = """
{apiVersion: kproxy.dev/v1, kind: Forward, name: lb, listen: ["203.0.113.20:443"], to: ["10.0.0.11:8443"]}
"""


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name.removeprefix(f"{TOP}/"): file.read().decode() for name, file in found.items() if file}


def explained(*words: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [KPROXY, "explain", "-o", "json", *words], capture_output=True, text=True, check=True)
    packets: list[dict[str, Any]] = json.loads(done.stdout)["packets"]
    return packets


def test_another_machine_answers_from_the_archive_as_the_node_does(node: Namespace, tmp_path: Path) -> None:
    archive = tmp_path / "report.tar.gz"
    node.run("ip", "link", "set", "lo", "up")
    node.run("ip", "address", "add", "172.30.0.1/32", "dev", "lo")
    node.ip("link add up0 type veth peer name up1", "link set up0 up", "link set up1 up")
    for family, setting in (("-4", "net.ipv4.ip_forward"), ("-6", "net.ipv6.conf.all.forwarding")):
        node.run("ip", family, "route", "add", "default", "dev", "up0")
        node.run("sysctl", "-qw", f"{setting}=1")
    flags = ("--mode=nftables", f"--manifests={SHOP}", f"--config={CONFIG}", "--hostname-override=node1")
    with running(node, *flags) as proxy:
        proxy.await_health()
        node.run(KPROXY, "report", str(archive))
        questions = (("shop/web",), ("10.1.1.11", "10.96.0.10:80"), ("outside", "shop/checkout"))
        live = [json.loads(node.run(KPROXY, "explain", "-o", "json", *q))["packets"] for q in questions]
    assert archive.stat().st_mode & 0o777 == 0o600
    found = members(archive)
    assert {"version.txt", "machine.json", "node.json", "configuration.yaml", "objects/objects.json",
            "plans.json", "metrics.txt", "log.txt", "status.json", "diff.json", "kernel/nft-ruleset.txt",
            } <= set(found)  # fmt: skip
    assert "kubeproxy_sync_proxy_rules" in found["metrics.txt"]
    assert "first sync" in found["log.txt"]
    assert "table ip kproxy" in found["kernel/nft-ruleset.txt"]
    assert json.loads(found["diff.json"]) == []
    assert json.loads(found["doctor.json"])["proxy"] == "nftables"
    assert yaml.safe_load(found["configuration.yaml"])["mode"] == "nftables"
    for words, packets in zip(questions, live, strict=True):
        answers = explained("--report", str(archive), *words)
        assert [packet.pop("kernel")["live"] for packet in answers] == [False] * len(answers)
        for packet in packets:
            del packet["kernel"]
        assert answers == packets


def test_without_a_proxy_an_archive_notes_it_and_has_the_rest(node: Namespace, tmp_path: Path) -> None:
    found = json.loads(node.run(KPROXY, "report", str(tmp_path / "a.tar.gz"), "-o", "json"))
    assert {"kernel/sysctl.txt", "doctor.json"} <= set(found["contents"])
    problems = members(tmp_path / "a.tar.gz")["problems.txt"]
    assert "no kproxy runs in this network namespace" in problems
    done = subprocess.run(
        [KPROXY, "explain", "shop/web", "--report", str(tmp_path / "a.tar.gz")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "not a report of kproxy with objects" in done.stderr) == (2, True)


def test_objects_are_reported_without_a_proxy(node: Namespace, manifests: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    (manifests / "lb.yaml").write_text(FORWARD)
    node.run(KPROXY, "report", str(archive), "--mode=iptables", f"--manifests={manifests}")
    for to, endpoint in (("10.96.0.10:80", "10.1.2.3:8080"), ("Forward/lb", "10.0.0.11:8443")):
        (packet,) = explained("10.1.9.9", to, "--report", str(archive))
        assert packet["kernel"]["mode"] == "iptables"
        assert packet["endpoints"][0]["endpoint"] == endpoint
    assert (packet["frontend"]["service_port"], packet["frontend"]["origin"]) == (
        "Forward/lb:443", "file lb.yaml")


def test_an_archive_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_text("mine")
    done = subprocess.run(
        [KPROXY, "report", str(tmp_path / "a.tar.gz")], capture_output=True, text=True, check=False)
    assert (done.returncode, "File exists" in done.stderr) == (1, True)
    assert (tmp_path / "a.tar.gz").read_text() == "mine"


def archived(directory: Path, data: bytes) -> dict[str, str]:
    """The members of the archive *data*."""
    (directory / "piped.tar.gz").write_bytes(data)
    return members(directory / "piped.tar.gz")


@pytest.mark.parametrize("file", [[], ["-"], ["/dev/stdout"]], ids=["no file", "-", "/dev/stdout"])
def test_a_pipe_gets_the_archive_and_the_standard_error_its_contents(
    manifests: Path, tmp_path: Path, file: list[str],
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [KPROXY, "report", *file, "--mode=iptables", f"--manifests={manifests}"],
        capture_output=True, check=True, cwd=empty)  # fmt: skip
    found = archived(tmp_path, done.stdout)
    assert done.stderr.decode().splitlines()[-1] == f"standard output: {', '.join(found)}"
    assert "objects/objects.json" in found
    assert list(empty.iterdir()) == []


def on_a_terminal(directory: Path, *arguments: str) -> tuple[int, str]:
    """The status and the output of `kproxy report` on a terminal, in *directory*."""
    ours, theirs = pty.openpty()
    command = [KPROXY, "report", *arguments]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=directory) as made:
        os.close(theirs)
        text = b""
        with suppress(OSError):  # EIO: the other end is closed
            while piece := os.read(ours, 65536):
                text += piece
    os.close(ours)
    return made.returncode, text.decode()


def test_on_a_terminal_the_archive_is_a_file_where_it_runs(manifests: Path, tmp_path: Path) -> None:
    directory = tmp_path / "empty"
    directory.mkdir()
    status, text = on_a_terminal(directory, "--mode=iptables", f"--manifests={manifests}")
    (path,) = directory.iterdir()
    assert (status, text.splitlines()[-1].partition(":")[0]) == (0, path.name)
    assert "plans.json" in members(path)


def test_no_archive_is_written_to_a_terminal(tmp_path: Path) -> None:
    status, text = on_a_terminal(tmp_path, "-")
    assert (status, "name a file or use a pipe" in text) == (2, True)


@pytest.mark.parametrize(("value", "shown"), [
    ({"client": {"token": "abc", "qps": 5}}, {"client": {"token": "(left out)", "qps": 5}}),
    ({"master": "https://me:word@api:6443/"}, {"master": "https://api:6443/"}),
    ({"backendOptions": [{"apiPassword": "x"}]}, {"backendOptions": [{"apiPassword": "(left out)"}]}),
    ({"password": ""}, {"password": ""}),
], ids=str)  # fmt: skip
def test_secrets_are_left_out(value: dict[str, Any], shown: dict[str, Any]) -> None:
    assert without_secrets(value) == shown

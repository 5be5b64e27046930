"""What all commands have in common: exit status, output formats, and what they print where and how much."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from kproxy_core.cli.commands import COMMANDS
from kproxy_core.cli.kubectl import COMMANDS as KUBECTL_COMMANDS
from tests.core.cli.test_cli import EXAMPLES, WEB
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import KPROXY, kproxy, running

KUBECTL_KPROXY = Path(sys.executable).with_name("kubectl-kproxy")
SHOP = (
    f"--manifests={EXAMPLES / 'shop'}", f"--config={EXAMPLES / 'kproxy.yaml'}", "--hostname-override=node1",
)  # fmt: skip

Words = tuple[str, ...]

# The exit status of a mistake.

MISTAKES: dict[str, list[Words]] = {
    "modes": [("nftable",), ("--load-modules",)],
    "status": [("please",)],
    "explain": [("a", "b", "c"), ("10.96.0.10:99999", *SHOP), ("somewhere", "web", *SHOP),
                ("web:80/icmp", *SHOP), ("web", "--mode=nftable", *SHOP), ("web", "--manifests=/no/such"),
                ("web", "--kubeconfig=/no/such"), ("web", "--master=ftp://there"),
                ("web", "--config=/no/such"), ("web", "--report=/no/such")],
    "diff": [("-o", "xml")],
    "verify": [(), ("--traffic", "--dry-run", "10.96.0.10", *SHOP), ("--traffic", "--rate=fast")],
    "doctor": [("--cluster-cidr=10.0.0.0/33", SHOP[0])],
    "trace": [("--count=none", "web"), ("somewhere", "web", *SHOP), ("a", "b", "c")],
    "top": [("--sort=beauty",)],
    "plan": [()],
    "switch": [()],
    "render": [(), ("--family=ipv5",), ("--mode=nftable", *SHOP)],
    "report": [("one", "two")],
    "version": [("-o", "xml")],
    "completion": [("tcsh",)],
    "unit": [("--mode=nftables",)],
}  # fmt: skip
"""By command."""


def test_every_command_has_mistakes() -> None:
    assert MISTAKES.keys() == COMMANDS.keys()


@pytest.mark.parametrize(
    "words", [*((name, *words) for name, each in MISTAKES.items() for words in each), ("vesion",),
              ("--no-such",), ("--mode=nftable", "--manifests=/"), ("--config=/no/such",), ("--dry-run",),
              ("--cleanup", "--config=/no/such"), ("--write-config-to=/dev/null", "--mode=nftable")],
    ids=" ".join)  # fmt: skip
def test_a_mistake_of_the_caller_is_status_2(words: Words) -> None:
    done = kproxy(*words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert done.stdout == ""


@pytest.mark.parametrize("name", KUBECTL_COMMANDS)
def test_a_mistake_is_status_2_for_a_fleet_too(name: str) -> None:
    done = subprocess.run([KUBECTL_KPROXY, name, "--no-such"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr


def test_a_kubeconfig_that_cannot_be_used_is_one() -> None:
    done = subprocess.run([KUBECTL_KPROXY, "status", "--kubeconfig=/no/such"], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 2
    assert "the kubeconfig cannot be used" in done.stderr


@pytest.mark.parametrize(
    "words", [("status",), ("explain", "web"), ("switch", "nftables"), ("explain", "wbe", *SHOP)],
    ids=" ".join)  # fmt: skip
def test_no_answer_is_status_1(words: Words) -> None:
    with namespace() as node:
        assert kproxy(*words, node=node).returncode == 1


# Formats.

@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """A node on which a proxy runs."""
    manifests = tmp_path_factory.mktemp("manifests")
    (manifests / "web.yaml").write_text(WEB)
    with namespace() as node, running(node, "--mode=nftables", f"--manifests={manifests}") as proxy:
        proxy.await_health()
        yield node


ANSWERS: dict[str, Words] = {
    "modes": (),
    "status": (),
    "explain": ("outside", "web:80"),
    "diff": (),
    "verify": ("--traffic", "--dry-run", "web:80"),
    "doctor": (),
    "top": ("--once",),
    "plan": (str(EXAMPLES / "shop"),),
    "switch": ("--check", "nftables"),
    "version": (),
}
"""Commands that print one answer, with arguments beside a running proxy."""
TEXTS: dict[str, Words] = {
    "render": SHOP, "completion": ("bash",), "unit": (), "report": ("-",), "trace": ("--help",),
}  # fmt: skip
"""The other ones. A trace prints only packets."""


def test_every_command_has_an_answer_or_a_text() -> None:
    assert {*ANSWERS, *TEXTS} == {*COMMANDS}


@pytest.mark.parametrize(("words", "told"), [
    (("switch", "nftable"), "did you mean 'nftables'?"),
    (("switch", "--check", "iptable"), "did you mean 'iptables'?"),
    (("explain", "10.96.0.10:99999"), "99999 is not a port"),
    (("explain", "somewhere", "web"), "a sender is an address, pod, node or outside"),
    (("trace", "web:80/icmp"), "'icmp' is not tcp, udp or sctp"),
    (("verify", "--traffic", "10.96.0.10"), "is not [NAMESPACE/]SERVICE"),
    (("top", "--once", f"--filter={'x' * 300}"), "search"),
], ids=lambda value: " ".join(value)[:30] if isinstance(value, tuple) else "")  # fmt: skip
def test_a_mistake_is_one_for_the_running_proxy_too(
    words: Words, told: str, served: Namespace
) -> None:
    done = kproxy(*words, node=served)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert told in done.stderr


@pytest.mark.parametrize("name", ANSWERS)
def test_yaml_has_what_json_has(name: str, served: Namespace) -> None:
    def answer(output: str) -> object:
        done = kproxy(name, *ANSWERS[name], "-o", output, node=served)
        assert done.returncode in (0, 1), done.stderr
        return (json.loads if output == "json" else yaml.safe_load)(done.stdout)

    in_json, in_yaml = answer("json"), answer("yaml")
    assert shape(in_yaml) == shape(in_json)
    assert in_json


def shape(value: object) -> object:
    """Return *value* without numbers and what depends on them: time passes between two answers."""
    match value:
        case dict():
            return {key: shape(each) for key, each in value.items()}
        case list():
            return [shape(each) for each in value[:1]]
        case float() | int():
            return "a number"
    return type(value)


def test_a_switch_has_a_document_for_each_step(served: Namespace) -> None:
    done = kproxy("switch", "nftables", "-o", "yaml", node=served)
    steps = list(yaml.safe_load_all(done.stdout))
    assert steps[0] == {"step": "nftables already serves"}
    assert steps[-1]["mode"] == "nftables"


# What is printed.

@pytest.mark.parametrize("name", [*ANSWERS, *TEXTS])
def test_a_reader_that_has_gone_ends_a_command_without_a_word(name: str, served: Namespace) -> None:
    words = (ANSWERS | TEXTS)[name]
    done = to_nobody(["ip", "netns", "exec", served.name, KPROXY, name, *words])
    assert done.returncode == 141
    assert all(" WARNING " in line for line in done.stderr.splitlines()), done.stderr


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("explain", "--help")], ids=" ".join)
def test_a_reader_of_help_may_go_too(words: Words) -> None:
    for program in (KPROXY, KUBECTL_KPROXY):
        done = to_nobody([program, *words])
        assert (done.returncode, done.stderr) == (141, "")


def to_nobody(command: Sequence[str | Path]) -> "subprocess.CompletedProcess[str]":
    """Run *command* with a pipe as output that no process reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)


@pytest.mark.parametrize("words", [("explain", "web:80"), ("render",), ("verify", "--traffic", "--dry-run")],
                         ids=" ".join)  # fmt: skip
def test_steps_are_logged_only_when_asked_for(words: Words) -> None:
    with namespace() as node:
        quiet = kproxy(*words, *SHOP, node=node)
        verbose = kproxy(*words, *SHOP, "-v", node=node)
    assert "INFO" not in quiet.stderr
    assert "INFO sources: directory of manifests read" in verbose.stderr
    assert quiet.stdout == verbose.stdout


def test_the_version_is_a_command() -> None:
    assert kproxy("version").stdout == kproxy("--version").stdout
    told = json.loads(kproxy("version", "-o", "json").stdout)
    assert told["kube_proxy"] == "1.36"
    assert told["version"] in kproxy("version").stdout.split()


# Completion.

def completed(line: str) -> set[str]:
    """Return what bash offers at the end of *line*."""
    script = f"""
        source <({KPROXY} completion bash)
        COMP_WORDS=({line}) COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        compopt() {{ :; }}
        _kproxy_completion {KPROXY} >/dev/null
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [("kproxy swi", {"switch"}), ("kproxy switch nf", {"nftables"}), ("kproxy modes i", {"iptables", "ipvs"}),
     ("kproxy --mode u", {"userspace"}), ("kproxy explain --cluster-c", {"--cluster-cidr"}),
     ("kproxy completion z", {"zsh"})])  # fmt: skip
def test_bash_completes(line: str, offered: set[str]) -> None:
    assert completed(line) == offered


@pytest.mark.parametrize(("shell", "registers"), [
    ("bash", "-F _kproxy_completion kproxy"), ("zsh", "#compdef kproxy"), ("fish", "--command kproxy"),
])  # fmt: skip
def test_each_shell_reads_its_completion(shell: str, registers: str) -> None:
    script = kproxy("completion", shell).stdout
    assert registers in script
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")

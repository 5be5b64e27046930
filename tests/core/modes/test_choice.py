"""The fallback from a mode that does not work: real processes, with plugins that refuse."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.contract.test_registry import plugin
from tests.core.installed_plugins import install
from tests.core.namespaces import Namespace, namespace
from tests.core.observe.test_events import PATIENT, Taker
from tests.core.processes import KPROXY, Proxy, running

BROKEN = "raise RuntimeError('what a bug')"
LACKING = "raise Unsupported('no warp drive')"
TROUBLE = "raise SyncFailed('busy')"


def source(
    mode: str, *, fallback: str = "", begins: str = "", usable: bool = True, preference: int = 0
) -> str:
    """The source of a plugin whose backend *begins* so, if it begins at all."""
    text = plugin(mode, usable=usable, preference=preference)
    text = text.replace('summary="a test"', f'summary="a test", fallback="{fallback}"')
    return text + (f"    def begin(self):\n        {begins}\n" if begins else "")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """The environment in which plugins in `tmp_path` are found."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "manifests").mkdir()
    with namespace() as made:
        yield made


def put(directory: Path, **sources: str) -> None:
    """Install a plugin for each mode."""
    modules = {f"some_{mode}": text for mode, text in sources.items()}
    install(directory, "some", {mode: f"some_{mode}" for mode in sources}, **modules)


def flags(directory: Path, *more: str) -> list[str]:
    return [f"--manifests={directory}/manifests", "--hostname-override=node1", *more]


def proxy_mode(node: Namespace) -> tuple[str, dict[str, str]]:
    """Body and headers of /proxyMode."""
    head, _, body = node.run("curl", "-si", "http://127.0.0.1:10249/proxyMode").partition("\n\n")
    return body, dict(line.split(": ", 1) for line in head.splitlines()[1:])


def failed(node: Namespace, *arguments: str, status: int = 1) -> str:
    """Return kproxy's complaint at startup, which ends it with *status*."""
    done = subprocess.run(
        ["ip", "netns", "exec", node.name, KPROXY, *arguments],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done.stderr


def serves(proxy: Proxy, node: Namespace) -> str:
    proxy.await_health()
    return proxy_mode(node)[0]


@pytest.mark.parametrize("begins", [LACKING, BROKEN, ""], ids=["says so", "has a bug", "is asked"])
def test_a_mode_that_does_not_work_falls_back(begins: str, node: Namespace, tmp_path: Path) -> None:
    put(tmp_path, wanted=source("wanted", fallback="second", begins=begins, usable=False),
        second=source("second", fallback="third", begins=LACKING),
        third=source("third", begins="return True"))  # fmt: skip
    with running(node, *flags(tmp_path, "--mode=wanted")) as proxy:
        assert serves(proxy, node) == "third"


def test_a_family_that_does_not_work_is_left_out_unless_it_is_the_primary_one(
    node: Namespace, tmp_path: Path
) -> None:
    begins = """if Family.IPV6 in Made.families:
            raise Unsupported('no warp drive for IPv6', Family.IPV6)
        return True"""
    made = "    return Made()"
    wanted = source("wanted", fallback="second", begins=begins).replace(
        made, f"    Made.families = settings.families\n{made}")
    put(tmp_path, wanted=wanted, second=source("second", begins="return True"))
    with running(node, *flags(tmp_path, "--mode=wanted")) as proxy:
        assert serves(proxy, node) == "wanted"
        assert set(json.loads(proxy.health()[1])["status"]) == {"IPv4"}
        _, log = proxy.end()
    assert "IP family is not served mode=wanted ip_family=IPv6 because=\"no warp drive for IPv6\"" in log
    six = ("--bind-address=2001:db8::1", "--metrics-bind-address=127.0.0.1:10249")
    with running(node, *flags(tmp_path, "--mode=wanted", *six)) as proxy:
        assert serves(proxy, node) == "second"


def test_iptables_serves_one_family_where_the_other_has_no_nat_table(
    node: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("ip6tables", "ip6tables-nft", "ip6tables-legacy"):
        (programs / name).write_text("#!/bin/sh\necho 'Table does not exist' >&2; exit 3\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with running(node, *flags(tmp_path, "--mode=iptables")) as proxy:
        assert serves(proxy, node) == "iptables"
        assert set(json.loads(proxy.health()[1])["status"]) == {"IPv4"}
    told = node.run(KPROXY, "modes", "iptables", "--probe", "-v")
    assert "ok       IPv6: not served: IPv6: nat table: Table does not exist" in told


def test_the_fallback_is_visible_everywhere(node: Namespace, tmp_path: Path) -> None:
    put(tmp_path, wanted=source("wanted", fallback="second", begins=LACKING), second=source("second"))
    with running(node, *flags(tmp_path, "--mode=wanted")) as proxy:
        assert serves(proxy, node) == "second"
        body, headers = proxy_mode(node)
        metrics = proxy.get(10249, "/metrics")[1]
        assert '"mode":"second"' in proxy.get(10249, "/configz")[1]
        _, log = proxy.end()
    assert body == "second"
    assert headers["Kproxy-Mode-Wanted"] == "wanted"
    assert headers["Kproxy-Mode-Fallback-Reason"] == "no warp drive"
    assert 'kproxy_mode_fallback{serving="second",wanted="wanted"} 1\n' in metrics
    (line,) = [line for line in log.splitlines() if "falling back" in line]
    assert "WARN" in line
    assert "no warp drive" in line


def test_an_event_of_the_node_reports_the_fallback(node: Namespace, tmp_path: Path) -> None:
    put(tmp_path, wanted=source("wanted", fallback="second", begins=LACKING), second=source("second"))
    (tmp_path / "patient.py").write_text(PATIENT)
    with node.inside(Taker) as taker:
        thread = threading.Thread(target=taker.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            failed(node, "--mode=wanted", f"--master={taker.url}", "--hostname-override=node1",
                   "--bind-address-hard-fail", "--healthz-bind-address=192.0.2.1:9999",
                   "-p", "patient")  # fmt: skip
        finally:
            taker.shutdown()
            thread.join()
    (told,) = [body for _, _, body in taker.posted if body["reason"] == "ModeFallback"]
    assert told["type"] == "Warning"
    assert told["regarding"]["kind"] == "Node"
    assert told["note"] == "mode wanted does not work here, second serves: no warp drive"


def test_a_working_mode_is_reported_without_a_fallback(node: Namespace, tmp_path: Path) -> None:
    put(tmp_path, wanted=source("wanted", fallback="second", begins="return True", usable=False),
        second=source("second"))  # fmt: skip
    with running(node, *flags(tmp_path, "--mode=wanted")) as proxy:
        assert serves(proxy, node) == "wanted"
        assert not [name for name in proxy_mode(node)[1] if name.startswith("Kproxy")]
        assert "kproxy_mode_fallback{" not in proxy.get(10249, "/metrics")[1]


def test_a_transient_failure_causes_no_fallback(node: Namespace, tmp_path: Path) -> None:
    put(tmp_path, wanted=source("wanted", fallback="second", begins=TROUBLE), second=source("second"))
    with running(node, *flags(tmp_path, "--mode=wanted")) as proxy:
        assert serves(proxy, node) == "wanted"


@pytest.mark.parametrize("in_file", [False, True])
def test_never_is_an_error_that_names_the_reason(in_file: bool, node: Namespace, tmp_path: Path) -> None:
    put(tmp_path, wanted=source("wanted", fallback="second", begins=LACKING), second=source("second"))
    given = ["--mode=wanted", "--mode-fallback=never"]
    if in_file:
        (tmp_path / "config.yaml").write_text(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: wanted\n"
            f"kproxy: {{modeFallback: never, manifests: {tmp_path}/manifests}}\n"
        )
        given = [f"--config={tmp_path}/config.yaml"]
    problem = failed(node, *(given if in_file else flags(tmp_path, *given)))
    assert "mode wanted does not work on this machine: no warp drive" in problem
    assert "Traceback" not in problem


def test_if_no_mode_works_every_reason_is_given(node: Namespace, tmp_path: Path) -> None:
    put(tmp_path, wanted=source("wanted", fallback="second", begins=LACKING),
        second=source("second", fallback="wanted", usable=False))  # fmt: skip
    problem = failed(node, *flags(tmp_path, "--mode=wanted"))
    assert "wanted: no warp drive; second: a kernel: one. get one" in problem


@pytest.mark.parametrize("fallback", ["", "nowhere", "refused"])
def test_a_missing_fallback_is_ignored(fallback: str, node: Namespace, tmp_path: Path) -> None:
    put(tmp_path, wanted=source("wanted", fallback=fallback, begins=LACKING), refused="1/0")
    problem = failed(node, *flags(tmp_path, "--mode=wanted"))
    assert "no warp drive" in problem


def test_without_a_mode_the_preferred_one_that_works_serves(node: Namespace, tmp_path: Path) -> None:
    put(tmp_path, best=source("best", preference=3000, begins=LACKING),
        bug=source("bug", preference=2500, begins=BROKEN), good=source("good", preference=2000),
        low=source("low", preference=1000))  # fmt: skip
    with running(node, *flags(tmp_path)) as proxy:
        assert serves(proxy, node) == "good"
        assert not [name for name in proxy_mode(node)[1] if name.startswith("Kproxy")]


def test_nftables_serves_where_a_foreign_rule_makes_iptables_refuse_its_table(
    node: Namespace, tmp_path: Path
) -> None:
    node.nft("""
        add table ip nat
        add chain ip nat POSTROUTING { type nat hook postrouting priority 100; }
        add rule ip nat POSTROUTING ip daddr 1.2.3.4 masquerade persistent
    """)
    with running(node, *flags(tmp_path, "--mode=iptables")) as proxy:
        assert serves(proxy, node) == "nftables"
        metrics = proxy.get(10249, "/metrics")[1]
    assert 'kproxy_mode_fallback{serving="nftables",wanted="iptables"} 1\n' in metrics


def test_every_fallback_is_tried_once_those_of_a_mode_before_theirs(node: Namespace, tmp_path: Path) -> None:
    several = {"wanted": "('second', 'third', 'nowhere')", "second": "('wanted', 'fourth')"}
    modes = {
        mode: source(mode, begins=LACKING).replace('fallback=""', f"fallback={several.get(mode, repr(''))}")
        for mode in ("wanted", "second", "third", "fourth")
    }
    put(tmp_path, **modes)
    problem = failed(node, *flags(tmp_path, "--mode=wanted"))
    assert [mode for mode in modes if f"{mode}: no warp drive" in problem] == list(modes)
    places = [problem.index(f"{mode}: no warp drive") for mode in modes]
    assert places == sorted(places)


def test_nftables_serves_without_its_binding(node: Namespace, tmp_path: Path) -> None:
    (tmp_path / "nftables.py").write_text("raise ImportError('not for this Python')")
    with running(node, *flags(tmp_path, "--mode=nftables")) as proxy:
        assert serves(proxy, node) == "nftables"


def test_init_only_prepares_the_mode_that_will_serve(node: Namespace, tmp_path: Path) -> None:
    put(tmp_path, wanted=source("wanted", fallback="second", begins=LACKING), second=source("second"))
    done = subprocess.run(
        ["ip", "netns", "exec", node.name, KPROXY, *flags(tmp_path, "--mode=wanted", "--init-only")],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "mode=second" in done.stderr.replace('"', "")


DEPTH = """    if settings.options.get("depth", 1) not in range(9):
        raise InvalidOption(settings, "depth", settings.options["depth"], "must be within 0 to 8")
    return Made()"""


def with_depth(text: str) -> str:
    """Return the source of the plugin *text* of mode wanted with an option."""
    made = '    return Made()'
    return text.replace('summary="a test"', 'summary="a test", options=("depth",)').replace(made, DEPTH)


def configured(directory: Path, options: str) -> str:
    """Return the flag with a file that has mode wanted and these *options* of backends."""
    (directory / "config.yaml").write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: wanted\n"
        f"kproxy: {{manifests: {directory}/manifests, backendOptions: {options}}}\n"
    )
    return f"--config={directory}/config.yaml"


@pytest.mark.parametrize(("options", "problem"), [
    ("{wanted: {dept: 3}}",
     "kproxy.backendOptions.wanted.dept: 3: mode wanted has no such option; did you mean 'depth'?"),
    ("{wanted: {depth: 9}}", "kproxy.backendOptions.wanted.depth: 9: must be within 0 to 8"),
])  # fmt: skip
@pytest.mark.parametrize("command", [(), ("--init-only",), ("render",)], ids=" ".join)
def test_a_wrong_option_ends_a_start_instead_of_falling_back(
    command: tuple[str, ...], options: str, problem: str, node: Namespace, tmp_path: Path
) -> None:
    put(tmp_path, wanted=with_depth(source("wanted", fallback="second")), second=source("second"))
    said = failed(node, *command, configured(tmp_path, options), "--hostname-override=node1", status=2)
    assert problem in said
    assert "Traceback" not in said


def test_an_option_is_checked_only_if_its_mode_serves_and_has_named_its_options(
    node: Namespace, tmp_path: Path
) -> None:
    put(tmp_path, wanted=source("wanted", fallback="second"), second=with_depth(source("second")))
    options = configured(tmp_path, "{wanted: {dept: 3}, second: {dept: 3}}")
    with running(node, options, "--hostname-override=node1") as proxy:
        assert serves(proxy, node) == "wanted"


def test_a_wrong_option_of_the_fallback_ends_a_start(node: Namespace, tmp_path: Path) -> None:
    put(tmp_path, wanted=source("wanted", fallback="second", begins=LACKING),
        second=with_depth(source("second")))  # fmt: skip
    said = failed(node, configured(tmp_path, "{second: {dept: 3}}"), "--hostname-override=node1", status=2)
    assert "kproxy.backendOptions.second.dept: 3: mode second has no such option" in said


@pytest.mark.parametrize(("flags", "problem"), [
    (("--mode=userspace", "--userspace-listen=here"), "--userspace-listen: 'here': must be an IP address"),
    (("--mode=ipvs", "--ipvs-scheduler=fastest"), "--ipvs-scheduler: 'fastest': must be one of rr, "),
])  # fmt: skip
def test_a_wrong_flag_of_a_mode_is_named(flags: tuple[str, ...], problem: str, node: Namespace) -> None:
    assert problem in failed(node, *flags, "--manifests=.", "--hostname-override=node1", status=2)


IPVS_OFF = "--feature-gates=KubeProxyIPVS=false"


def test_a_mode_whose_gate_is_off_is_refused_and_never_switched_to(node: Namespace, tmp_path: Path) -> None:
    assert "--mode: 'ipvs': needs the feature gate KubeProxyIPVS" in failed(
        node, *flags(tmp_path, "--mode=ipvs", IPVS_OFF), status=2)
    with running(node, *flags(tmp_path, "--mode=nftables", IPVS_OFF)) as proxy:
        proxy.await_health()
        for asked in (["switch", "ipvs"], ["switch", "--check", "ipvs"]):
            assert "the feature gate KubeProxyIPVS is off" in failed(node, *asked)
        assert serves(proxy, node) == "nftables"
    probed = json.loads(subprocess.run(
        [KPROXY, "modes", "--probe", IPVS_OFF, "-o", "json"], capture_output=True, text=True, check=False,
    ).stdout)
    (ipvs,) = [mode for mode in probed["modes"] if mode["mode"] == "ipvs"]
    assert not ipvs["usable"]
    assert [requirement["found"] for requirement in ipvs["requirements"]] == [
        "the feature gate KubeProxyIPVS is off"]

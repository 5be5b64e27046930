"""Every flag of kube-proxy is taken, in each of the forms that it takes, and means the same."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kproxy_core.cli import kproxy
from kproxy_core.cli.commands import COMMANDS
from kproxy_core.cli.options import FlagCommand, with_flags
from kproxy_core.config.check import field_at
from kproxy_core.config.file import ConfigError, decode, load
from kproxy_core.config.flags import (
    COMMON,
    FLAGS,
    OLDER,
    PROCESS,
    RULES,
    Flag,
    Flags,
    spared_by_cleanup,
    version_told,
)
from kproxy_core.config.settings import Config, effective, effective_flags, resolve, written
from kproxy_core.model.duration import Duration
from tests.core.golden import golden


def golden_flags() -> dict[str, str]:
    """Name and type ("" for a switch) of each flag that kube-proxy lists."""
    lines = golden("flags.txt").read_text().splitlines()
    found = [re.fullmatch(r"(?:-\w, )?--([\w-]+) ?(.*)", line.strip()) for line in lines]
    return {match[1]: match[2] for match in found if match}


def parsed(*arguments: str) -> Flags:
    """The flags as the command line gives them to the configuration."""

    @click.command(cls=FlagCommand, context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-")})
    @with_flags(RULES, PROCESS, OLDER)
    def command(**options: Any) -> dict[str, Any]:
        return options

    options = command.main(list(arguments), standalone_mode=False)
    texts = {k: ",".join(v) if isinstance(v, tuple) else v for k, v in options.items()}
    return Flags({name: text for name, text in texts.items() if text})


def from_flags(*arguments: str) -> Config:
    return resolve(parsed(*arguments), None)


def problems(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        from_flags(*arguments)
    return [str(problem) for problem in raised.value.problems]


VALUES = {
    "ip": "fd00::1", "ipport": "[fd00::1]:99", "duration": "7m0s", "int32": "9", "float32": "2.5",
    "strings": "10.0.0.0/8", "mapStringBool": "AllowServiceExternalIPs=false", "pattern=N,": "loop=4",
    "Level": "4", "LocalMode": "NodeCIDR", "ProxyMode": "ipvs", "string": "x", "quantity": "4Ki",
    "version": "raw",
}
"""A value for each type of flag."""

FITTING = {"logging-format": "json", "cluster-cidr": "10.0.0.0/8", "show-hidden-metrics-for-version": "1.35",
           "iptables-min-sync-period": "7s", "ipvs-min-sync-period": "7s"}
"""Values for flags that don't take any text."""


@pytest.mark.parametrize(("name", "kind"), golden_flags().items())
def test_each_flag_of_kube_proxy_is_taken_and_sets_its_fields(name: str, kind: str) -> None:
    if name == "help":
        return
    value = FITTING.get(name, VALUES[kind] if kind else "false")
    given = parsed(f"--{name}={value}")
    parameter = "mode" if name == "proxy-mode" else name.replace("-", "_")
    assert given == {parameter: value}
    gates = Flags(given, feature_gates="LoggingAlphaOptions=true") if name.startswith("log-") else given
    document = resolve(gates, None).document
    for path in FLAGS[parameter].fields:
        assert text(field_at(document, path)) == value


def text(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return ",".join(f"{k}={text(v)}" for k, v in value.items())
        case tuple():
            return ",".join(map(text, value))
        case msgspec.Struct():
            return "=".join(str(field) for field in msgspec.structs.astuple(value))
        case _:
            return str(value)


@pytest.mark.parametrize("form", ["text", "json"])
def test_streams_and_buffers_of_the_log_are_taken_without_an_effect(form: str) -> None:
    gate = "--feature-gates=LoggingAlphaOptions=true"
    assert from_flags(gate, f"--log-{form}-split-stream", f"--log-{form}-info-buffer-size=4Ki").notices == (
        f"--log-{form}-split-stream has no effect: the log is standard error",
        f"--log-{form}-info-buffer-size has no effect: each line is written at once",
    )


@pytest.mark.parametrize("text", ["winkernel: {sourceVip: x}", "windowsRunAsService: true", "portRange: 1-9"])
def test_fields_that_mean_nothing_on_linux_are_taken_without_an_effect(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{text}\n")
    (notice,) = resolve(Flags(), load(str(file))).notices
    assert notice.startswith(f"{text.partition(':')[0]} has no effect: ")


def shown_by_help(*command: str) -> set[str]:
    output = CliRunner().invoke(kproxy, [*command, "--help"]).output
    return set(re.findall(r"^  (?:-\w, )?(?:--mode, )?--([\w-]+)", output, re.MULTILINE))


WITHOUT_EFFECT = {
    "boot-id-file", "config-sync-period", "log-flush-frequency",
    "log-json-info-buffer-size", "log-json-split-stream", "log-text-info-buffer-size",
    "log-text-split-stream", "machine-id-file", "show-hidden-metrics-for-version", "vmodule",
}  # fmt: skip


def test_help_shows_every_flag_that_has_an_effect() -> None:
    ours = {"dry-run", "exclusive", "manifests", "mode-fallback", "output", "own-only", "plugin",
            "userspace-listen"}  # fmt: skip
    assert shown_by_help() == (set(golden_flags()) - WITHOUT_EFFECT) | ours


def test_help_groups_the_flags_and_begins_with_the_common_ones() -> None:
    output = CliRunner().invoke(kproxy, ["--help"]).output
    places = [output.index(text) for text in (
        "\nCommon options:\n", "\n  --mode, --proxy-mode MODE ", "\n  --config FILE ", "\n  --cleanup ",
        "\nkube-proxy options: node and traffic:\n", "\n  --cluster-cidr CIDRS ",
        "\nkproxy options:\n", "\n  --mode-fallback ", "\nDebugging options:\n", "\n  --profiling ")]
    assert places == sorted(places)


def test_help_of_a_command_shows_its_own_options_and_the_common_flags_first() -> None:
    shown = shown_by_help("explain")
    assert {"from", "report", "output"} <= shown
    assert {"mode" if name == "proxy-mode" else name for name in shown} & set(COMMON) == {
        "mode", "config", "manifests", "kubeconfig", "master", "hostname-override"}
    assert "cluster-cidr" not in shown


def test_help_breaks_lines_at_blanks_only() -> None:
    for command in ([], *([name] for name in COMMANDS)):
        lines = CliRunner().invoke(kproxy, [*command, "--help"], terminal_width=80).output.splitlines()
        assert lines
        assert not [line for line in lines if len(line) > 80 or re.search(r"\w-$|default:$", line)]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_sentence_of_each(name: str) -> None:
    command = kproxy.get_command(click.Context(kproxy), name)
    assert command is not None
    assert command.name == name
    assert (command.help or "").startswith(f"{COMMANDS[name]}\n")


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS.values() if flag.default], ids=lambda flag: flag.name)
def test_help_tells_the_default_in_effect(flag: Flag) -> None:
    config = from_flags("--mode=ipvs") if flag.name.startswith("ipvs-") else from_flags()
    in_effect: Any = effective(config) | {"kproxy": {"modeFallback": config.kproxy.mode_fallback}}
    for name in flag.fields[0].split("."):
        in_effect = in_effect[name]
    shown = Duration.parse(flag.default) if flag.metavar == "DURATION" else flag.default
    assert str(shown) == text(in_effect)


def test_the_configuration_is_written_byte_for_byte_as_kube_proxy_does() -> None:
    assert written(resolve(Flags(write_config_to="-"), None)) == golden("default-config.yaml").read_text()


def test_a_written_file_means_the_same_when_read(tmp_path: Path) -> None:
    flags = ("--mode=nftables", "--masquerade-all", "--bind-address=::", "--hostname-override=Node1",
             "--conntrack-tcp-timeout-established=90s", "--nodeport-addresses=primary",
             "--manifests=/objects", "--feature-gates=ComponentFlagz=false",
             "--iptables-min-sync-period=2s", "--vmodule=a=1,b=2")
    config = from_flags(*flags)
    (tmp_path / "config.yaml").write_text(written(config))
    assert resolve(Flags(), load(str(tmp_path / "config.yaml"))).effect == replace(
        config.effect, notices=tuple(told.replace("--vmodule", "logging.vmodule") for told in config.notices))


CHOICES = {
    "masquerade-all": ("true", "false"),
    "cluster-cidr": ("10.0.0.0/8", "10.0.0.0/8,fd00::/8"),
    "nodeport-addresses": ("primary", "10.0.0.0/8,fd00::/8"),
    "conntrack-min": ("0", "5"),
    "conntrack-tcp-timeout-established": ("0s", "90s"),
    "iptables-sync-period": ("10s", "1h1.5s"),
    "iptables-min-sync-period": ("3s", "50ms"),
    "iptables-masquerade-bit": ("0", "31"),
    "iptables-localhost-nodeports": ("true", "false"),
    "ipvs-exclude-cidrs": ("10.0.0.0/8", "fd00::/8,10.0.0.0/8"),
    "ipvs-min-sync-period": ("2s", "100ms"),
    "ipvs-scheduler": ("rr", "null", "1"),
    "bind-address": ("::", "10.0.0.1"),
    "healthz-bind-address": ("10.0.0.1", "[fd00::1]:9"),
    "detect-local-mode": ("NodeCIDR", "ClusterCIDR"),
    "feature-gates": ("AllAlpha=true", "AllowServiceExternalIPs=false,ComponentFlagz=false"),
    "logging-format": ("text", "json"),
    "v": ("0", "4"),
    "hostname-override": ("Node1", "true", "0x1", "~", "2026-01-02"),
    "manifests": ("/objects", "a: b # c", "\N{SNOWMAN}"),
    "kube-api-qps": ("0.5", "-1", "1e3"),
    "oom-score-adj": ("-1000", "0"),
}
"""Values that the flags may have."""


@given(
    st.sampled_from(("iptables", "ipvs", "nftables", "ebpf")),
    st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in CHOICES.items()}),
)
def test_the_file_written_for_any_flags_means_the_same(
    mode: str, chosen: dict[str, str]
) -> None:
    config = from_flags(f"--mode={mode}", *(f"--{name}={value}" for name, value in chosen.items()))
    again = resolve(Flags(), decode(written(config)))
    if not config.min_sync_period:  # kube-proxy's default is written, and obeyed where it is
        assert again.min_sync_period in (0, 1)
        again = replace(again, min_sync_period=0.0)
    if not config.node_port_addresses and mode in ("nftables", "ebpf"):  # so is the default of these modes
        assert again.node_port_addresses == ("primary",)
        again = replace(again, node_port_addresses=())
    assert again.effect == config.effect


def test_options_of_a_backend_can_always_be_shown(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: any\n"
                    "kproxy: {backendOptions: {any: {day: 2026-01-02, sizes: [1.0], deep: {7: null}}}}\n")
    shown = effective(resolve(Flags(), load(str(file))))["kproxy"]
    assert shown["backendOptions"] == {"any": {"day": "2026-01-02", "sizes": [1], "deep": {"7": None}}}


def test_the_section_of_kproxy_has_only_its_additions() -> None:
    wanted = yaml.safe_load(golden("default-config.yaml").read_text())
    ours = yaml.safe_load(written(from_flags("--mode=iptables", "--manifests=/objects")))
    assert ours.pop("kproxy")["manifests"] == "/objects"
    assert ours == wanted


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ("--masquerade-all", {"masquerade_all": "true"}),
        ("--masquerade_all=false", {"masquerade_all": "false"}),
        ("--proxy_mode=ipvs", {"mode": "ipvs"}),
        ("-v=4", {"v": "4"}),
        ("-v4", {"v": "4"}),
        ("--cleanup=true", {"cleanup": "true"}),
        ("--version", {"version": "true"}),
    ],
)
def test_forms_of_a_flag(argument: str, wanted: Mapping[str, str]) -> None:
    assert parsed(argument) == wanted


def test_lists_may_be_given_in_pieces_and_the_last_of_other_flags_counts() -> None:
    assert parsed("--nodeport-addresses=10.0.0.0/8,fd00::/8", "--nodeport-addresses", "192.0.2.0/24") == {
        "nodeport_addresses": "10.0.0.0/8,fd00::/8,192.0.2.0/24"}
    assert parsed("--v=1", "--v=2") == {"v": "2"}


def test_flags_of_the_userspace_mode_reach_its_backend(tmp_path: Path) -> None:
    flags = ("--proxy-port-range=1000-1009", "--udp-timeout=1s", "--bind-address=192.0.2.1")
    assert from_flags(*flags).backend_options == {}
    in_mode = from_flags("--mode=userspace", *flags)
    assert in_mode.notices == ()
    assert in_mode.backend_options == {
        "portRange": "1000-1009", "udpIdleTimeout": 1.0, "bindAddress": "192.0.2.1"}
    file = tmp_path / "config.yaml"
    file.write_text("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
                    "mode: userspace\nportRange: 1000+9\n")
    assert resolve(Flags(), load(str(file))).backend_options["portRange"] == "1000+9"


@pytest.mark.parametrize("flag", [flag for flag in OLDER if flag.no_effect], ids=lambda flag: flag.name)
def test_an_older_flag_without_an_effect_gets_a_notice(flag: Any) -> None:
    given = f"--{flag.name}" if not flag.metavar else f"--{flag.name}=x"
    assert from_flags(given).notices == (f"--{flag.name} has no effect: {flag.no_effect}",)


@pytest.mark.parametrize(
    ("arguments", "notice"),
    [
        (["--proxy-port-range=1-9"], "--proxy-port-range has no effect: it is for mode userspace"),
        (["--config-sync-period=1m"], "--config-sync-period has no effect: watches need no resync"),
        (["--log-flush-frequency=1s"], "--log-flush-frequency has no effect: each line is written at once"),
        (["--show-hidden-metrics-for-version=1.35"],
         "--show-hidden-metrics-for-version has no effect: no metric is hidden"),
        (["--vmodule=a=1"], "--vmodule has no effect: its patterns name kube-proxy's source files"),
        (["--feature-gates=NativeHistograms=true"],
         "featureGates.NativeHistograms has no effect: histograms have buckets"),
    ],
)
def test_flags_without_effect_are_reported(arguments: list[str], notice: str) -> None:
    assert from_flags(*arguments).notices == (notice,)


@pytest.mark.parametrize(
    ("arguments", "health", "metrics"),
    [
        ([], "0.0.0.0:10256", "127.0.0.1:10249"),
        (["--healthz-port=0"], "None", "127.0.0.1:10249"),
        (["--healthz-port=1", "--metrics-port=2"], "0.0.0.0:10256", "127.0.0.1:10249"),
        (["--healthz-port=1", "--healthz-bind-address=10.0.0.1"], "10.0.0.1:1", "127.0.0.1:10249"),
        (["--metrics-port=2", "--metrics-bind-address=fd00::1"], "0.0.0.0:10256", "[fd00::1]:2"),
        (["--metrics-port=2", "--metrics-bind-address=10.0.0.1:3"], "0.0.0.0:10256", "10.0.0.1:3"),
        (["--metrics-port=0", "--healthz-port=0", "--write-config-to=x"], "0.0.0.0:10256", "127.0.0.1:10249"),
    ],
)
def test_the_older_ports_complete_an_address_without_one(
    arguments: list[str], health: str, metrics: str
) -> None:
    config = from_flags(*arguments)
    assert (str(config.healthz_bind_address), str(config.metrics_bind_address)) == (health, metrics)


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("--metrics-port=0", "--metrics-port: '0': the metrics server cannot be disabled"),
        ("--healthz-port=70000", "--healthz-port: '70000': must be a port"),
        ("--conntrack-min=many", "--conntrack-min: 'many': must be a whole number"),
        ("--kube-api-qps=fast", "--kube-api-qps: 'fast': must be a number"),
        ("--oom-score-adj=1001", "--oom-score-adj: 1001: must be within -1000 to 1000"),
        ("--profiling=maybe", "--profiling: 'maybe': must be true or false"),
        ("--ipvs-sync-period=x", "--ipvs-sync-period: 'x': 'x' is not a duration such as 30s or 1m30s"),
        ("--feature-gates=A", "--feature-gates: 'A': must be GATE=true or GATE=false, separated by commas"),
        ("--vmodule=a", "--vmodule: 'a': must be PATTERN=N, separated by commas"),
        ("--iptables-sync-period=0s", "--iptables-sync-period: 0s: must be greater than 0"),
    ],
)
def test_a_wrong_value_is_reported_with_its_flag(argument: str, problem: str) -> None:
    assert problems(argument) == [problem]


def test_the_periods_of_flags_are_for_their_mode() -> None:
    given = ("--iptables-sync-period=11s", "--iptables-min-sync-period=2s", "--ipvs-sync-period=22s")
    periods = {
        mode: (config.sync_period, config.min_sync_period)
        for mode in ("iptables", "nftables", "ebpf", "ipvs")
        for config in [from_flags(*given, f"--mode={mode}")]
    }
    assert periods == {"iptables": (11, 2), "nftables": (11, 2), "ebpf": (11, 2), "ipvs": (22, 0)}


def test_flags_win_over_the_file_only_where_kube_proxys_do(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
                    "logging: {vmodule: [{filePattern: b, verbosity: 2}]}\nconntrack: {min: 5}\n")
    given = parsed("--vmodule=a=1", "--conntrack-min=7", "--log-flush-frequency=9s")
    config = resolve(given, load(str(file)))
    assert [module.file_pattern for module in config.document.logging.vmodule] == ["a", "b"]
    assert config.document.logging.flush_frequency == Duration(9)
    assert config.conntrack.min == 5
    assert "--conntrack-min has no effect beside --config" in config.notices


def test_cleanup_may_spare_a_mode() -> None:
    assert spared_by_cleanup(parsed("--cleanup")) == ()
    assert spared_by_cleanup(parsed("--cleanup", "--cleanup-ipvs")) == ()
    assert spared_by_cleanup(parsed("--cleanup", "--cleanup-ipvs=false")) == ("ipvs",)


@pytest.mark.parametrize(
    ("given", "told"),
    [("true", "kproxy "), ("raw", "v1alpha1"), ("false", ""), ("v1.36.2", ""), ("v1.36.2+abc", "")],
)
def test_the_version_is_printed_or_replaced(given: str, told: str) -> None:
    assert (told in version_told(given)) if told else version_told(given) == ""


@pytest.mark.parametrize("given", ["v1", "1.36.2", "v1.36.2 x", "latest"])
def test_an_invalid_version_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        version_told(given)


def test_every_flag_is_shown_with_the_value_in_effect() -> None:
    shown = effective_flags(parsed("--cluster-cidr=10.0.0.0/8", "--masquerade-all"))
    assert (shown["cluster-cidr"], shown["profiling"]) == ("10.0.0.0/8", "false")
    assert shown["masquerade-all"] == "true"
    assert (shown["conntrack-min"], shown["config-sync-period"]) == ("131072", "15m0s")
    assert set(golden_flags()) - set(shown) == {"help", "proxy-mode"}

"""The configuration file: every field, every default, durations, and what is said about mistakes."""

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.config.file import (
    API_VERSION,
    ConfigError,
    FileConfig,
    KubeProxyConfiguration,
    ModeSection,
    decode,
    load,
)
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import resolve, written
from kproxy_core.model.duration import Duration
from tests.core.golden import golden

HEAD = f"apiVersion: {API_VERSION}\nkind: KubeProxyConfiguration\n"


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        decode(text)
    return [str(problem) for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("text", "seconds", "written"),
    [
        ("0", 0, "0s"),
        ("0s", 0, "0s"),
        ("50ms", 0.05, "50ms"),
        ("1m30s", 90, "1m30s"),
        ("15m", 900, "15m0s"),
        ("24h", 86400, "24h0m0s"),
        ("1.5h", 5400, "1h30m0s"),
        (".5s", 0.5, "500ms"),
        ("1.s", 1, "1s"),
        ("2.25s", 2.25, "2.25s"),
        ("1500us", 0.0015, "1.5ms"),
        ("100µs", 0.0001, "100µs"),
        ("100μs", 0.0001, "100µs"),
        ("7ns", 7e-9, "7ns"),
        ("-3ms", -0.003, "-3ms"),
        ("+1s", 1, "1s"),
        ("1h1m1.000000001s", 3661.000000001, "1h1m1.000000001s"),
    ],
)
def test_durations_are_read_and_written_as_in_go(text: str, seconds: float, written: str) -> None:
    assert Duration.parse(text) == seconds
    assert str(Duration.parse(text)) == written


@pytest.mark.parametrize(
    "text",
    ["", "1", "s", ".s", "-", "1 s", "1S", "1x", "1h-1m", " 1s", "1s\n", "٣s", "3000000h", "9" * 30 + "s"],
)
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        Duration.parse(text)


@given(st.integers(min_value=-(2**53), max_value=2**53))
def test_a_duration_survives_being_written(nanoseconds: int) -> None:
    duration = Duration(nanoseconds / 1e9)
    assert Duration.parse(str(duration)) == pytest.approx(duration, abs=1e-9)


def test_the_defaults_are_those_of_kube_proxy() -> None:
    """The files that ``kube-proxy --write-config-to`` writes.

    It writes the periods of the active mode only, fills in the mode and addresses, and leaves out
    what is empty.
    """
    wanted = yaml.safe_load(golden("default-config.yaml").read_text())
    for section in ("ipvs", "nftables"):
        del wanted[section]["syncPeriod"], wanted[section]["minSyncPeriod"]
    ours = plain(KubeProxyConfiguration())
    ours |= {
        "apiVersion": API_VERSION,
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "detectLocalMode": "ClusterCIDR",
        "healthzBindAddress": "0.0.0.0:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }
    differences = {
        key: (ours.get(key), value) for key, value in wanted.items() if not contains(ours.get(key), value)
    }
    assert differences == {}


def plain(struct: msgspec.Struct) -> dict[str, object]:
    built = msgspec.json.decode(msgspec.json.encode(struct, enc_hook=str))
    assert isinstance(built, dict)
    return built


def contains(ours: object, wanted: object) -> bool:
    if isinstance(wanted, dict) and isinstance(ours, dict):
        return all(contains(ours.get(key), value) for key, value in wanted.items())
    return ours == wanted or (wanted is None and not ours)


def test_every_field_that_kube_proxy_writes_is_known() -> None:
    file = load(str(golden("default-config.yaml")))
    assert file.notices == ()
    assert file.document.mode == "iptables"


def test_every_field_arrives() -> None:
    """Each field gets a value that is not its default, and must show up under its own name."""
    document = plain(KubeProxyConfiguration())
    text = yaml.safe_dump({"apiVersion": API_VERSION, "kind": "KubeProxyConfiguration", **changed(document)})
    file = decode(text)
    assert file.notices == ()
    assert plain(file.document) == changed(document)


def changed(value: object) -> dict[str, object]:
    """A file in which nothing is as in *value*."""
    assert isinstance(value, dict)
    special = {
        "featureGates": {"AllowServiceExternalIPs": False},
        "backendOptions": {"ebpf": {"maps": 3}},
        "plugins": ["no:ipvs"],
        "switchModes": ["iptables"],
        "nodePortAddresses": ["10.0.0.0/8"],
        "excludeCIDRs": ["10.0.0.0/8"],
        "udpIdleTimeout": "10s",
        "vmodule": [{"filePattern": "loop", "verbosity": 4}],
    }
    out: dict[str, object] = {}
    for key, default in value.items():
        if key in special:
            out[key] = special[key]
        elif isinstance(default, dict):
            out[key] = changed(default)
        elif isinstance(default, bool):
            out[key] = not default
        elif isinstance(default, int | float):
            out[key] = default + 1
        elif default.endswith("s") and default[0].isdigit():
            out[key] = "7m0s"
        else:
            out[key] = default + "x"
    return out


@pytest.mark.parametrize(
    "text",
    [
        HEAD + "iptables: {syncPeriod: 0s, minSyncPeriod: 0s, masqueradeBit: null}\n",
        HEAD + "clientConnection: {qps: 0, burst: 0, contentType: ''}\nconfigSyncPeriod: 0s\n",
        HEAD + "conntrack: null\noomScoreAdj: null\nlogging: {format: ''}\nbindAddress: ''\n",
        HEAD + "nftables:\n  minSyncPeriod: 0s\nmode:\n",
    ],
)
def test_zero_and_null_mean_the_default_as_in_kube_proxy(text: str) -> None:
    assert decode(text).document == KubeProxyConfiguration()


def test_an_explicit_zero_is_kept_elsewhere() -> None:
    document = decode(
        HEAD + "conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s}\noomScoreAdj: 0\n"
    ).document
    assert (document.conntrack.max_per_core, document.conntrack.min) == (0, 0)
    assert document.conntrack.tcp_established_timeout == Duration(0)
    assert document.oom_score_adj == 0


def test_ipvs_may_sync_at_once() -> None:
    assert decode(HEAD).document.ipvs.min_sync_period == Duration(0)
    assert decode(HEAD).document.nftables.min_sync_period == Duration(1)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "mode: nftables\n",
            [
                "apiVersion: '': must be kubeproxy.config.k8s.io/v1alpha1",
                "kind: '': must be KubeProxyConfiguration",
            ],
        ),
        (
            HEAD
            + "mode: 4\noomScoreAdj: many\nenableProfiling: 'yes'\n"
            + "nftables: {syncPeriod: 30, masqueradeBit: 1.5}\n",
            [
                "mode: 4: Expected str, got int",
                "oomScoreAdj: 'many': Expected int, got str",
                "enableProfiling: 'yes': Expected bool, got str",
                "nftables.syncPeriod: 30: Expected a duration such as 30s, got int",
                "nftables.masqueradeBit: 1.5: Expected int, got float",
            ],
        ),
        (
            HEAD + "nftables: {syncPeriod: soon}\n",
            ["nftables.syncPeriod: 'soon': 'soon' is not a duration such as 30s or 1m30s"],
        ),
        (
            HEAD + f"logging: {{flushFrequency: {1 << 63}}}\n",
            [f"logging.flushFrequency: {1 << 63}: {1 << 63} ns is too long for a duration"],
        ),
        (HEAD + "iptables: 7\n", ["iptables: 7: Expected a mapping, got int"]),
        (
            HEAD + "nodePortAddresses: 10.0.0.0/8\n",
            ["nodePortAddresses: '10.0.0.0/8': Expected array, got str"],
        ),
        (HEAD + "nodePortAddresses: [a, 5]\n", ["nodePortAddresses[1]: 5: Expected str, got int"]),
        (HEAD + "featureGates: {A: 1}\n", ["featureGates[...]: {'A': 1}: Expected bool, got int"]),
        (HEAD + "oomScoreAdj: 99999999999\n", ["oomScoreAdj: 99999999999: Expected int <= 2147483647"]),
        ("", ["--config: None: is not a KubeProxyConfiguration"]),
        ("- a\n", ["--config: ['a']: is not a KubeProxyConfiguration"]),
        ("just words", ["--config: 'just words': is not a KubeProxyConfiguration"]),
    ],
)
def test_every_wrong_field_is_named(text: str, wanted: list[str]) -> None:
    assert problems(text) == wanted


@pytest.mark.parametrize(
    "text", ["a: [", "a: b: c", "\t", "a: *nobody", "{", "? [a]\n: b\n"]
)
def test_a_broken_file_is_one_problem(text: str) -> None:
    assert len(problems(text)) == 1


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        (
            "nodePortAdresses: []\n",
            "nodePortAdresses: unknown field, ignored; did you mean 'nodePortAddresses'?",
        ),
        (
            "iptables: {masqueradeal: true}\n",
            "iptables.masqueradeal: unknown field, ignored; did you mean 'masqueradeAll'?",
        ),
        ("conntrack: {zzz: 1}\n", "conntrack.zzz: unknown field, ignored"),
        ("conntrack: {7: 1}\n", "conntrack.7: unknown field, ignored"),
        ("mode: ipvs\nmode: nftables\n", "mode: duplicate field, the last one counts"),
        ("ipvs: {scheduler: rr, scheduler: sh}\n", "scheduler: duplicate field, the last one counts"),
    ],
)
def test_an_unknown_or_repeated_field_is_noticed_and_the_rest_counts(text: str, notice: str) -> None:
    file = decode(HEAD + "oomScoreAdj: -5\n" + text)
    assert file.document.oom_score_adj == -5
    assert resolve(Flags(), file).notices == (notice,)


def test_json_is_read_too() -> None:
    head = f'"apiVersion": "{API_VERSION}",\n\t"kind": "KubeProxyConfiguration"'
    assert decode("{" + head + ', "mode": "ipvs", "mode": "nftables"}') == FileConfig(
        KubeProxyConfiguration(mode="nftables"), ("mode: duplicate field, the last one counts",)
    )
    assert decode("{" + head.replace("\t", "") + ", mode: ipvs}").document.mode == "ipvs"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*can't be read: No such file"):
        load(str(tmp_path / "nowhere"))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        load(str(binary))


def test_every_mode_has_its_section() -> None:
    document = KubeProxyConfiguration()
    for mode in ("iptables", "ipvs", "nftables"):
        name, section = document.section_of(mode)
        assert name == mode
        assert isinstance(section, ModeSection)
    assert document.section_of("")[0] == document.section_of("logging")[0] == "iptables"
    assert document.section_of("section_of")[0] == document.section_of("a-b")[0] == "iptables"


@pytest.mark.parametrize(("more", "notices"), [
    ("---\n", ()), ("---\n---\n# nothing\n", ()), ("...\n", ()),
    ("---\nkind: KubeletConfiguration\n", ("only the first document counts, as in kube-proxy",)),
    ("---\n- [\n", ("only the first document counts, as in kube-proxy",)),
    ("---\nmode: a\nmode: b\n", ("only the first document counts, as in kube-proxy",)),
])  # fmt: skip
def test_the_first_document_counts(more: str, notices: tuple[str, ...]) -> None:
    for head in ("", "---\n", "# a comment\n---\n"):
        file = decode(f"{head}{HEAD}mode: ipvs\n{more}")
        assert (file.document.mode, file.notices) == ("ipvs", notices)


@pytest.mark.parametrize(("text", "hint"), [
    ("strictARP: true", "strictARP: unknown field, ignored; did you mean 'ipvs.strictARP'?"),
    ("bridgeInterface: x", "bridgeInterface: unknown field, ignored; "
     "did you mean 'detectLocal.bridgeInterface'?"),
    ("masqueradeAll: true", "masqueradeAll: unknown field, ignored; "
     "did you mean 'iptables.masqueradeAll' or 'nftables.masqueradeAll'?"),
    ("ipvs: {clusterCIDR: x}", "ipvs.clusterCIDR: unknown field, ignored; did you mean 'clusterCIDR'?"),
    ("ipvs: {strictArp: true}", "ipvs.strictArp: unknown field, ignored; did you mean 'strictARP'?"),
    ("clusterCidr: x", "clusterCidr: unknown field, ignored; did you mean 'clusterCIDR'?"),
    ("entirely: x", "entirely: unknown field, ignored"),
])  # fmt: skip
def test_a_hint_names_the_field_that_was_meant(text: str, hint: str) -> None:
    assert decode(HEAD + text).notices == (hint,)


@pytest.mark.parametrize(("text", "flags", "lines"), [
    ("mode: nftables", {}, ["nodePortAddresses: ['primary']"]),
    ("mode: nftables\nnodePortAddresses: []", {}, ["nodePortAddresses: ['primary']"]),
    ("mode: nftables\nnodePortAddresses: [localhost]", {}, ["nodePortAddresses: ['localhost']"]),
    ("mode: ipvs\nipvs: {excludeCIDRs: []}", {}, ["excludeCIDRs: []", "nodePortAddresses: None"]),
    ("mode: ipvs\nipvs: {excludeCIDRs: null}\nnodePortAddresses: []", {},
     ["excludeCIDRs: None", "nodePortAddresses: []"]),
    ("hostnameOverride: Node-01.Example.COM", {}, ["hostnameOverride: Node-01.Example.COM"]),
    ("hostnameOverride: Node-01.Example.COM", {"hostname_override": " Node-02 "},
     ["hostnameOverride: node-02"]),
    ("mode: iptables\nportRange: 1000+10\nudpIdleTimeout: 10s", {},
     ["portRange: ", "udpIdleTimeout: absent"]),
    ("mode: userspace\nportRange: 1000+10\nudpIdleTimeout: 10s", {},
     ["portRange: 1000+10", "udpIdleTimeout: 10s"]),
])  # fmt: skip
def test_what_is_written_is_kube_proxys(text: str, flags: dict[str, str], lines: list[str]) -> None:
    """As kube-proxy 1.36 writes it: platformApplyDefaults, and the conversion to v1alpha1."""
    config = resolve(Flags(flags), decode(HEAD + text))
    found = yaml.safe_load(written(config))
    found |= {"excludeCIDRs": found["ipvs"]["excludeCIDRs"]}
    wanted = [line.partition(": ")[::2] for line in lines]
    assert [(name, str(found.get(name, "absent"))) for name, _ in wanted] == wanted
    again = resolve(Flags(), decode(written(config)))
    assert written(again) == written(config)
    assert again.hostname_override == config.hostname_override == config.hostname_override.lower()


def test_the_idle_timeout_of_the_userspace_mode_may_be_a_field_or_a_flag() -> None:
    by_file = resolve(Flags(), decode(HEAD + "mode: userspace\nudpIdleTimeout: 10s"))
    by_flag = resolve(Flags(mode="userspace", udp_timeout="10s"), None)
    assert by_file.backend_options["udpIdleTimeout"] == by_flag.backend_options["udpIdleTimeout"] == 10
    assert by_flag.option_sources["udpIdleTimeout"] == "--udp-timeout"
    unset = resolve(Flags(), decode(HEAD + "mode: userspace\nudpIdleTimeout: 0s"))
    assert unset.backend_options["udpIdleTimeout"] is None
    other = resolve(Flags(), decode(HEAD + "mode: iptables\nudpIdleTimeout: 10s"))
    assert other.notices == ("udpIdleTimeout has no effect: it is for mode userspace",)

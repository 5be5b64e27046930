"""Flags and file become one Config, and every mistake is named by the option it was made in."""


import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import cidrs
from kproxy_core.config.file import API_VERSION, ConfigError, decode, load
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import (
    BindAddress,
    Config,
    DetectLocalMode,
    effective,
    parse_node_port_addresses,
    resolve,
)
from kproxy_core.contract.errors import Unsupported
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import Description
from kproxy_core.model.address import Family, parse_address, parse_cidr
from kproxy_core.modes.settings import Configuration, node_settings, serving_settings
from tests.core.golden import golden

HEAD = f"apiVersion: {API_VERSION}\nkind: KubeProxyConfiguration\n"


def from_file(text: str, flags: Flags | None = None) -> Config:
    return resolve(flags or Flags(), decode(HEAD + text))


def problems_of_file(text: str, flags: Flags | None = None) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        from_file(text, flags)
    return [str(problem) for problem in raised.value.problems]


def problems_of_flags(flags: Flags) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        resolve(flags, None)
    return [str(problem) for problem in raised.value.problems]


def bind(address: str, port: int) -> BindAddress:
    return BindAddress(parse_address(address), port)


def test_the_defaults_are_those_of_kube_proxy() -> None:
    """kube-proxy's own file for its defaults means the same as no file, but for the period written in it."""
    written = resolve(Flags(), load(str(golden("default-config.yaml"))))
    assert written.min_sync_period == 1
    assert replace(written.effect, min_sync_period=0.0) == resolve(Flags(mode="iptables"), None).effect
    assert resolve(Flags(), None).mode == ""
    assert resolve(Flags(), None).notices == ()


@pytest.mark.parametrize(
    ("mode", "sync", "minimum", "everything", "bit", "options"),
    [
        ("", 11, 1.5, True, 5, {}),
        ("iptables", 11, 1.5, True, 5, {"localhostNodePorts": True, "masqueradeBit": 5}),
        ("ipvs", 22, 0, True, 5, {"scheduler": "sh"}),
        ("nftables", 33, 0.05, False, 7, {"minSyncPeriod": 0.05}),
        ("other", 11, 1.5, True, 5, {"maps": 3}),
        ("ebpf", 33, 0.05, False, 7, {"maps": 4}),
    ],
)
def test_a_mode_uses_its_own_section_or_that_of_iptables(
    mode: str, sync: float, minimum: float, everything: bool, bit: int, options: dict[str, object]
) -> None:
    config = from_file(
        f"mode: {mode}\n"
        "iptables: {syncPeriod: 11s, minSyncPeriod: 1500ms, masqueradeAll: true, masqueradeBit: 5}\n"
        "ipvs: {syncPeriod: 22s, scheduler: sh}\n"
        "nftables: {syncPeriod: 33s, minSyncPeriod: 50ms, masqueradeBit: 7}\n"
        "kproxy: {backendOptions: {other: {maps: 3}, ebpf: {maps: 4}}}\n"
    )
    assert (config.sync_period, config.min_sync_period) == (sync, minimum)
    assert (config.masquerade_all, config.masquerade_bit) == (everything, bit)
    assert options.items() <= config.backend_options.items()
    assert config.notices == ()


@pytest.mark.parametrize("mode", ["", "iptables", "nftables", "ipvs", "ebpf"])
@pytest.mark.parametrize("section", ["{}", "{minSyncPeriod: 0s}", "{minSyncPeriod: null}"])
def test_without_a_minimum_period_syncs_are_paced_by_their_cost(mode: str, section: str) -> None:
    config = from_file(f"mode: {mode}\niptables: {section}\nnftables: {section}\nipvs: {section}\n")
    assert config.min_sync_period == 0
    assert resolve(Flags(mode=mode), None).min_sync_period == 0


def test_a_minimum_period_equal_to_kube_proxys_default_is_obeyed_where_it_is_written() -> None:
    config = from_file("mode: nftables\nnftables: {minSyncPeriod: 1s}\niptables: {minSyncPeriod: 1s}\n")
    assert config.min_sync_period == 1
    assert resolve(Flags(mode="iptables", iptables_min_sync_period="1s"), None).min_sync_period == 1
    assert resolve(Flags(mode="ipvs", ipvs_min_sync_period="1s"), None).min_sync_period == 1


def test_a_section_of_ones_own_at_the_top_is_an_unknown_field() -> None:
    config = from_file("mode: ebpf\nebpf: {maps: 3}\n")
    assert config.notices == ("ebpf: unknown field, ignored",)
    assert config.backend_options == {}


def test_manifests_may_stand_in_the_file() -> None:
    content = "kproxy: {manifests: /objects}\n"
    assert from_file(content).kproxy.manifests == "/objects"
    assert from_file(content, Flags(manifests="/others")).kproxy.manifests == "/others"


def test_the_flag_for_the_mode_wins_and_takes_its_section() -> None:
    config = from_file("mode: iptables\nnftables: {syncPeriod: 7s}\n", Flags(mode="nftables"))
    assert (config.mode, config.sync_period) == ("nftables", 7)


def test_a_file_replaces_the_flags_except_those_that_count_beside_it() -> None:
    given = Flags(
        mode="ipvs",
        manifests="/objects",
        master="http://10.0.0.1",
        hostname_override="Node-1 ",
        v="4",
        logging_format="json",
        kubeconfig="/k",
        bind_address="10.0.0.9",
        healthz_bind_address="10.0.0.9:1",
        metrics_bind_address="10.0.0.9:2",
        detect_local_mode="NodeCIDR",
        cluster_cidr="10.0.0.0/8",
        pod_bridge_interface="br0",
        pod_interface_name_prefix="veth",
        nodeport_addresses="primary",
        masquerade_all="true",
    )
    alone, beside = resolve(given, None), from_file("hostnameOverride: other\n", given)
    for config in (alone, beside):
        assert (config.mode, config.kproxy.manifests, config.master) == ("ipvs", "/objects", "http://10.0.0.1")
        assert (config.hostname_override, config.verbosity, config.logging_format) == ("node-1", 4, "json")
    assert alone.client.kubeconfig == "/k"
    assert alone.bind_address == parse_address("10.0.0.9")
    assert alone.healthz_bind_address == bind("10.0.0.9", 1)
    assert alone.metrics_bind_address == bind("10.0.0.9", 2)
    assert alone.detect_local_mode is DetectLocalMode.NODE_CIDR
    assert (alone.bridge_interface, alone.interface_name_prefix) == ("br0", "veth")
    assert alone.node_port_addresses == ("primary",)
    assert alone.masquerade_all
    assert alone.notices == ()
    assert beside.healthz_bind_address == bind("0.0.0.0", 10256)
    assert not beside.masquerade_all
    assert sorted(beside.notices) == sorted(
        f"{flag} has no effect beside --config"
        for flag in (
            "--kubeconfig",
            "--bind-address",
            "--healthz-bind-address",
            "--metrics-bind-address",
            "--detect-local-mode",
            "--cluster-cidr",
            "--pod-bridge-interface",
            "--pod-interface-name-prefix",
            "--nodeport-addresses",
            "--masquerade-all",
        )
    )


def test_an_empty_flag_equals_no_flag() -> None:
    empty = Flags(
        bind_address="", healthz_bind_address="", metrics_bind_address="", hostname_override="", mode=""
    )
    assert resolve(empty, None) == resolve(Flags(), None)


@pytest.mark.parametrize(
    ("own", "healthz", "metrics", "wanted"),
    [
        ("", "", "", (("0.0.0.0", 10256), ("127.0.0.1", 10249))),
        ("::", "", "", (("::", 10256), ("::1", 10249))),
        ("fd00::1", "", "", (("::", 10256), ("::1", 10249))),
        ("10.0.0.1", "", "", (("0.0.0.0", 10256), ("127.0.0.1", 10249))),
        ("", "10.0.0.1", "fd00::1", (("10.0.0.1", 10256), ("fd00::1", 10249))),
        ("", "10.0.0.1:80", "[fd00::1]:65535", (("10.0.0.1", 80), ("fd00::1", 65535))),
        ("", "[::]:1", "::", (("::", 1), ("::", 10249))),
    ],
)
def test_bind_addresses(own: str, healthz: str, metrics: str, wanted: tuple[tuple[str, int], ...]) -> None:
    texts = f"bindAddress: '{own}'\nhealthzBindAddress: '{healthz}'\nmetricsBindAddress: '{metrics}'\n"
    flags = Flags(bind_address=own, healthz_bind_address=healthz, metrics_bind_address=metrics)
    for config in (from_file(texts), resolve(flags, None)):
        assert (config.healthz_bind_address, config.metrics_bind_address) == tuple(bind(*w) for w in wanted)


@pytest.mark.parametrize("key", [
    "", "kproxy.dev/mode", "mode", "example.com/Proxy_Mode.v1", "x." * 126 + "x/" + "y" * 63,
])
def test_the_key_of_the_label_that_names_the_mode(key: str) -> None:
    assert from_file(f"kproxy: {{modeFromNodeLabel: '{key}'}}\n").kproxy.mode_from_node_label == key


@pytest.mark.parametrize(("section", "wanted"), [
    ("{}", ("keep", "off", 0)),
    ("{removedEndpoints: reset, endpointHealth: passive, lastResort: 30s}", ("reset", "passive", 30)),
    ("{removedEndpoints: keep, endpointHealth: off, lastResort: off}", ("keep", False, 0)),
    ("{endpointHealth: 'off', lastResort: 'off'}", ("keep", "off", 0)),
    ("{lastResort: 1h}", ("keep", "off", 3600)),
])
def test_endpoints_that_leave_or_fail(section: str, wanted: tuple[str, str | bool, float]) -> None:
    found = from_file(f"kproxy: {section}\n").kproxy
    assert (found.removed_endpoints, found.endpoint_health, found.last_resort_seconds) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "localhost:80",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:",
        ":80",
        "10.0.0.1:x",
        "fd00::1:99999",
        "[10.0.0.1]:80",
        "[fd00::1]",
        "fd00::1]:80",
        "10.0.0.1:80:80",
        "10.0.0.1:8٣",
        "10.0.0.1:+80",
    ],
)
def test_an_invalid_bind_address_is_refused(text: str) -> None:
    wanted = f"{text!r}: must be IP:port, with a port of 1 to 65535"
    assert problems_of_file(f"healthzBindAddress: '{text}'\n") == [f"healthzBindAddress: {wanted}"]
    assert problems_of_flags(Flags(metrics_bind_address=text)) == [f"--metrics-bind-address: {wanted}"]


def test_cluster_cidrs() -> None:
    assert from_file("clusterCIDR: '10.0.0.0/8, fd00::/8'\n").cluster_cidrs == (
        parse_cidr("10.0.0.0/8"),
        parse_cidr("fd00::/8"),
    )
    elsewhere = from_file("clusterCIDR: nonsense\ndetectLocalMode: NodeCIDR\n")
    assert elsewhere.cluster_cidrs == ()


def test_node_port_addresses() -> None:
    assert from_file("").node_port_addresses == ()
    assert from_file("nodePortAddresses: [primary]\n").node_port_addresses == ("primary",)
    assert from_file("nodePortAddresses: [10.0.0.0/8, '::/0']\n").node_port_addresses == (
        parse_cidr("10.0.0.0/8"),
        parse_cidr("::/0"),
    )
    assert resolve(Flags(nodeport_addresses="10.0.0.0/8,::/0"), None).node_port_addresses == (
        parse_cidr("10.0.0.0/8"),
        parse_cidr("::/0"),
    )
    assert parse_node_port_addresses(("primary",)) == ("primary",)


LOOPBACK = cidrs("127.0.0.0/8 ::1/128")


@pytest.mark.parametrize(("words", "wanted"), [
    ("localhost", LOOPBACK),
    ("primary,localhost", ("primary", *LOOPBACK)),
    ("localhost,10.0.0.0/8,primary", (*LOOPBACK, *cidrs("10.0.0.0/8"), "primary")),
    ("all", cidrs("0.0.0.0/0 ::/0")),
    ("10.0.0.0/8, all", cidrs("10.0.0.0/8 0.0.0.0/0 ::/0")),
])
def test_keywords_of_node_port_addresses_combine(words: str, wanted: object) -> None:
    flagged = resolve(Flags(nodeport_addresses=words), None)
    assert flagged.node_port_addresses == wanted
    filed = from_file(f"nodePortAddresses: [{words}]\n")
    assert filed.node_port_addresses == wanted
    assert (filed.notices, flagged.notices) == ((), ())
    assert effective(filed)["nodePortAddresses"] == [word.strip() for word in words.split(",")]


def test_feature_gates() -> None:
    assert from_file("").feature_gates["AllowServiceExternalIPs"]
    config = from_file("featureGates: {AllowServiceExternalIPs: false, SidecarContainers: true}\n")
    assert not config.feature_gates["AllowServiceExternalIPs"]
    assert config.notices == (
        "featureGates.SidecarContainers has no effect: unknown feature gate",
    )


@pytest.mark.parametrize(("gates", "notices"), [
    ("NFTablesNetlink: true, KubeProxyNFTablesLocalhostNodePorts: true, KubeProxyIPVS: true", []),
    ("NFTablesNetlink: false",
     ["featureGates.NFTablesNetlink has no effect: nftables rules are always written as netlink messages"]),
    ("KubeProxyNFTablesLocalhostNodePorts: false", []),
    ("KubeProxyIPVS: false", []),
    ("AllowServiceExternalIPs: false", []),
])  # fmt: skip
def test_gates_of_later_versions_are_known(gates: str, notices: list[str]) -> None:
    assert list(from_file(f"mode: nftables\nfeatureGates: {{{gates}}}\n").notices) == notices


@pytest.mark.parametrize("version", ["1.35", "1.36", "1.37"])
def test_the_previous_version_of_each_version_is_taken(version: str) -> None:
    (notice,) = from_file(f"showHiddenMetricsForVersion: '{version}'\n").notices
    assert notice == "showHiddenMetricsForVersion has no effect: no metric is hidden"


@pytest.mark.parametrize(("mode", "gates", "may"), [
    ("nftables", "", True),
    ("nftables", "KubeProxyNFTablesLocalhostNodePorts: false", False),
    ("nftables", "AllBeta: false", False),
    ("ipvs", "KubeProxyNFTablesLocalhostNodePorts: false", True),
])
def test_a_gate_has_the_nftables_mode_leave_node_ports_on_loopback_alone(
    mode: str, gates: str, may: bool
) -> None:
    config = from_file(f"mode: {mode}\nnodePortAddresses: [localhost]\nfeatureGates: {{{gates}}}\n")
    assert config.may_relay_node_ports is may
    assert node_settings(config, Description(mode, "", (1, 0))).may_relay is may


def test_a_mode_without_its_gate_may_have_leftovers_but_not_be_asked_for() -> None:
    file = decode(HEAD + "featureGates: {KubeProxyIPVS: false}\n")
    assert problems_of_flags(Flags(mode="ipvs", feature_gates="KubeProxyIPVS=false")) == [
        "--mode: 'ipvs': needs the feature gate KubeProxyIPVS"]
    configuration = Configuration(Flags(), file)
    assert configuration.mode == ""
    config = configuration.of("ipvs")
    assert (config.mode, config.missing_gate) == ("ipvs", "KubeProxyIPVS")
    with pytest.raises(Unsupported, match="the feature gate KubeProxyIPVS is off"):
        serving_settings(config, Registry(), (Family.IPV4,))
    assert serving_settings(configuration.of("iptables"), Registry(), (Family.IPV4,)).families == (
        Family.IPV4,)


def test_a_gate_may_stand_for_its_stage() -> None:
    gates = from_file("featureGates: {AllAlpha: true, AllBeta: false, ComponentFlagz: true}\n").feature_gates
    assert (gates["LoggingAlphaOptions"], gates["ComponentStatusz"], gates["ComponentFlagz"]) == (
        True, False, True)
    assert not gates["NativeHistograms"]  # beta since 1.37
    assert gates["AllowServiceExternalIPs"]


CIDR = "must be a CIDR, primary, localhost or all"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "featureGates: {PreferSameTrafficDistribution: false}",
            "featureGates.PreferSameTrafficDistribution: False: is locked to true",
        ),
        ("iptables: {masqueradeBit: 32}", "iptables.masqueradeBit: 32: must be within 0 to 31"),
        (
            "mode: nftables\niptables: {masqueradeBit: -1}",
            "iptables.masqueradeBit: -1: must be within 0 to 31",
        ),
        (
            "mode: nftables\nnftables: {masqueradeBit: 32}",
            "nftables.masqueradeBit: 32: must be within 0 to 31",
        ),
        ("mode: ipvs\nipvs: {tcpTimeout: -1s}", "ipvs.tcpTimeout: -1s: must not be negative"),
        ("mode: ipvs\nipvs: {tcpFinTimeout: -1s}", "ipvs.tcpFinTimeout: -1s: must not be negative"),
        ("mode: ipvs\nipvs: {udpTimeout: -1s}", "ipvs.udpTimeout: -1s: must not be negative"),
        ("mode: ipvs\nipvs: {excludeCIDRs: [10.0.0.0/8, x]}", "ipvs.excludeCIDRs[1]: 'x': must be a CIDR"),
        ("oomScoreAdj: 1001", "oomScoreAdj: 1001: must be within -1000 to 1000"),
        ("oomScoreAdj: -1001", "oomScoreAdj: -1001: must be within -1000 to 1000"),
        ("conntrack: {maxPerCore: -1}", "conntrack.maxPerCore: -1: must not be negative"),
        ("conntrack: {min: -1}", "conntrack.min: -1: must not be negative"),
        (
            "conntrack: {tcpEstablishedTimeout: -1s}",
            "conntrack.tcpEstablishedTimeout: -1s: must not be negative",
        ),
        ("conntrack: {tcpCloseWaitTimeout: -1s}", "conntrack.tcpCloseWaitTimeout: -1s: must not be negative"),
        ("conntrack: {udpTimeout: -1s}", "conntrack.udpTimeout: -1s: must not be negative"),
        ("conntrack: {udpStreamTimeout: -1s}", "conntrack.udpStreamTimeout: -1s: must not be negative"),
        ("clientConnection: {burst: -1}", "clientConnection.burst: -1: must not be negative"),
        ("configSyncPeriod: -1s", "configSyncPeriod: -1s: must be greater than 0"),
        (
            "iptables: {syncPeriod: -5s, minSyncPeriod: 1ns}",
            "iptables.syncPeriod: -5s: must be greater than 0",
        ),
        (
            "mode: nftables\nnftables: {minSyncPeriod: -1s}",
            "nftables.minSyncPeriod: -1s: must not be negative",
        ),
        (
            "mode: ipvs\nipvs: {minSyncPeriod: 31s}",
            "ipvs.syncPeriod: 30s: must not be shorter than minSyncPeriod, 31s",
        ),
        ("bindAddress: 10.0.0.0/8", "bindAddress: '10.0.0.0/8': must be an IP address"),
        ("nodePortAddresses: [x]", f"nodePortAddresses[0]: 'x': {CIDR}"),
        ("nodePortAddresses: [primary, Localhost]", f"nodePortAddresses[1]: 'Localhost': {CIDR}"),
        ("nodePortAddresses: [all, 10.0.0.0/8, all]", "nodePortAddresses[2]: 'all': is given twice"),
        (
            "showHiddenMetricsForVersion: '1.34'",
            "showHiddenMetricsForVersion: '1.34': must be the previous minor version, "
            "one of 1.35, 1.36, 1.37",
        ),
        ("mode: ipvs\nfeatureGates: {KubeProxyIPVS: false}",
         "mode: 'ipvs': needs the feature gate KubeProxyIPVS"),
        (
            "detectLocalMode: clustercidr",
            "detectLocalMode: 'clustercidr': must be one of ClusterCIDR, NodeCIDR, "
            "BridgeInterface, InterfaceNamePrefix",
        ),
        (
            "detectLocalMode: BridgeInterface",
            "detectLocal.bridgeInterface: '': must not be empty with detectLocalMode BridgeInterface",
        ),
        (
            "detectLocalMode: InterfaceNamePrefix",
            "detectLocal.interfaceNamePrefix: '': must not be empty with detectLocalMode InterfaceNamePrefix",
        ),
        *(
            (
                f"detectLocalMode: {mode}\ndetectLocal: {{{field}: '{name}'}}",
                f"detectLocal.{field}: {name!r}: must be at most {longest} letters, digits and signs "
                'but / : * " and \\',
            )
            for mode, field, longest in (
                ("BridgeInterface", "bridgeInterface", 15),
                ("InterfaceNamePrefix", "interfaceNamePrefix", 14),
            )
            for name in ("abcdefghijklmnop"[: longest + 1], "veth*", 'a"b', "a/b", "a b")
        ),
        ("clusterCIDR: 10.0.0.1", "clusterCIDR: '10.0.0.1': must be a CIDR"),
        ("clusterCIDR: '10.0.0.0/8,'", "clusterCIDR: '': must be a CIDR"),
        (
            "clusterCIDR: '10.0.0.0/8,11.0.0.0/8'",
            "clusterCIDR: '10.0.0.0/8,11.0.0.0/8': must be one CIDR, or one of each IP family",
        ),
        (
            "clusterCIDR: '10.0.0.0/8,fd00::/8,11.0.0.0/8'",
            "clusterCIDR: '10.0.0.0/8,fd00::/8,11.0.0.0/8': must be one CIDR, or one of each IP family",
        ),
        ("logging: {flushFrequency: -1s}", "logging.flushFrequency: -1s: must be greater than 0"),
        ("logging: {verbosity: -1}", "logging.verbosity: -1: must not be negative"),
        ("logging: {format: xml}", "logging.format: 'xml': must be text or json"),
        (
            "logging: {format: json, vmodule: [{filePattern: a, verbosity: 1}]}",
            "logging.vmodule: 1: is for the text format only",
        ),
        (
            "logging: {options: {text: {splitStream: true}}}",
            "logging.options.text.splitStream: True: needs the feature gate LoggingAlphaOptions",
        ),
        (
            "logging: {options: {json: {infoBufferSize: 4Ki}}}",
            "logging.options.json.infoBufferSize: '4Ki': needs the feature gate LoggingAlphaOptions",
        ),
        ("hostnameOverride: '  '", "hostnameOverride: '  ': must not be blank"),
        ("kproxy: {removedEndpoints: drop}", "kproxy.removedEndpoints: 'drop': must be keep or reset"),
        ("kproxy: {endpointHealth: on}", "kproxy.endpointHealth: True: must be off or passive"),
        *(
            (f"kproxy: {{modeFromNodeLabel: {key!r}}}",
             f"kproxy.modeFromNodeLabel: {key!r}: must be the key of a label, such as kproxy.dev/mode")
            for key in ("/mode", "kproxy.dev/", "kproxy.dev/a/b", "Kproxy.dev/mode", "kproxy..dev/mode",
                        "-mode", "mode=ipvs", "a mode", "x" * 64, "x." * 127 + "/mode")
        ),
        *(
            (f"kproxy: {{lastResort: {text}}}",
             f"kproxy.lastResort: {value!r}: must be off, or a duration from 1s to 1h0m0s")
            for text, value in (("on", True), ("soon", "soon"), ("0s", "0s"), ("1h1s", "1h1s"), ("''", ""))
        ),
    ],
)
def test_each_rule(text: str, problem: str) -> None:
    assert problems_of_file(text + "\n") == [problem]


@pytest.mark.parametrize(
    "text",
    [
        "nftables: {masqueradeBit: 32}",
        "ipvs: {tcpTimeout: -1s, excludeCIDRs: [x], minSyncPeriod: -1s}",
        "mode: ipvs\niptables: {syncPeriod: -1s}",
        "mode: nftables\nnftables: {minSyncPeriod: 30s}",
    ],
)
def test_irrelevant_options_are_not_checked(text: str) -> None:
    assert from_file(text + "\n").notices == ()


def test_all_problems_are_reported_at_once_with_their_options() -> None:
    assert problems_of_file(
        "conntrack: {min: -1}\nbindAddress: x\nclusterCIDR: y\n", Flags(v="-1")
    ) == [
        "--v: -1: must not be negative",
        "conntrack.min: -1: must not be negative",
        "bindAddress: 'x': must be an IP address",
        "clusterCIDR: 'y': must be a CIDR",
    ]
    assert problems_of_flags(
        Flags(
            v="-1",
            logging_format="xml",
            detect_local_mode="BridgeInterface",
            nodeport_addresses="x,primary,127.0.0.1",
            bind_address="y",
            hostname_override="\t",
        )
    ) == [
        "--v: -1: must not be negative",
        "--logging-format: 'xml': must be text or json",
        "--pod-bridge-interface: '': must not be empty with detectLocalMode BridgeInterface",
        "--bind-address: 'y': must be an IP address",
        "--hostname-override: '\\t': must not be blank",
        f"--nodeport-addresses[0]: 'x': {CIDR}",
        f"--nodeport-addresses[2]: '127.0.0.1': {CIDR}",
    ]

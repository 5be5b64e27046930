"""The chart: Helm accepts it, values reach the objects, and a value that it does not know is refused."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kproxy_core.config.file import ConfigError, decode
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import resolve
from kproxy_core.model.duration import Duration
from tests.core.golden import golden
from tests.deploy import schema
from tests.deploy.objects import CHART, DEPLOY, Object, chart, containers, helm
from tests.deploy.programs import program

SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text())
VALUES: Object = yaml.safe_load((CHART / "values.yaml").read_text())
TEMPLATES = {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}
DIGEST = f"sha256:{'0' * 64}"
SCRAPED: Object = {"podMonitor": {"enabled": True}, "config": {"metricsBindAddress": "0.0.0.0:10249"}}


def template_of(objects: dict[str, Object]) -> Object:
    """Return the template of the pods."""
    template: Object = objects["DaemonSet"]["spec"]["template"]
    return template


def images(values: Object) -> set[str]:
    return {container["image"] for container in containers(chart(values)["DaemonSet"])}


def test_helm_finds_nothing_wrong() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


# -- values

def fields(schema: Object, path: str = "") -> Iterator[str]:
    """Yield the paths of the values that *schema* names."""
    for name, of in schema.get("properties", {}).items():
        yield f"{path}{name}"
        yield from fields(of, f"{path}{name}.")


def keys(values: Object, path: str = "") -> Iterator[str]:
    """Yield the paths of *values*, down to those that are the contents of a field of Kubernetes."""
    for name, value in values.items():
        yield f"{path}{name}"
        if isinstance(value, dict) and f"{path}{name}" not in CONTENTS:
            yield from keys(value, f"{path}{name}.")


CONTENTS = {"config", "nodeSelector", "resources", "rollingUpdate", "seccompProfile", "affinity",
            "imagePullSecrets"}


def test_the_schema_knows_the_values_and_no_others() -> None:
    known = {path for path in fields(SCHEMA) if "." not in path or path.partition(".")[0] not in CONTENTS}
    assert set(keys(VALUES)) == known - {"global"}


def test_the_templates_use_the_values_and_no_others() -> None:
    values = set(keys(VALUES))
    used = set(re.findall(r"\.Values\.([\w.]+)", "".join(TEMPLATES.values())))
    of_image = TEMPLATES["_helpers.tpl"]
    used |= {f"image.{name}" for name in ("repository", "tag", "digest") if f" .{name} " in of_image}
    assert used - values == {"config.metricsBindAddress", "config.mode"}
    assert {path for path in values if not any(f"{name}.".startswith(f"{path}.") for name in used)} == set()


@pytest.mark.parametrize(("values", "complaint"), [
    ({"mode": "ebpf"}, "additional properties 'mode' not allowed"),
    ({"image": {"name": "kproxy"}}, "at '/image': additional properties 'name' not allowed"),
    ({"image": {"digest": "latest"}}, "at '/image/digest'"),
    ({"podDisruptionBudget": {}}, "additional properties 'podDisruptionBudget' not allowed"),
    ({"apiServer": "192.0.2.10:6443"}, "at '/apiServer'"),
    ({"capabilities": ["CAP_NET_RAW"]}, "at '/capabilities/0'"),
    ({"rollingUpdate": {"maxSurge": "some"}}, "at '/rollingUpdate/maxSurge'"),
    ({"podLabels": {"a": 1}}, "at '/podLabels/a': got number, want string"),
    ({"ebpf": "yes"}, "at '/ebpf': got string, want boolean"),
    ({"podMonitor": {"enabled": True}}, "set config.metricsBindAddress"),
    ({"config": {"apiVersion": "v1"}}, "at '/config': additional properties 'apiVersion' not allowed"),
], ids=lambda value: json.dumps(value) if isinstance(value, dict) else "")  # fmt: skip
def test_a_wrong_value_is_refused(values: Object, complaint: str) -> None:
    done = helm("template", "kproxy", str(CHART), values=values)
    assert done.returncode != 0
    assert complaint in done.stderr


# -- the configuration

def test_the_schema_knows_the_configuration() -> None:
    assert schema.FILE.read_text(encoding="utf-8") == schema.updated(), "run python -m tests.deploy.schema"


MODES = "value must be one of '', 'ebpf', 'iptables', 'ipvs', 'nftables', 'userspace'"


@pytest.mark.parametrize(("config", "complaint"), [
    ({"mode": "nftable"}, f"at '/config/mode': {MODES}"),
    ({"mode": "nftable", "kproxy": {"exclusive": True}}, f"at '/config/mode': {MODES}"),
    ({"kproxy": {"switchModes": ["iptable"]}}, "at '/config/kproxy/switchModes/0'"),
    ({"clusterCidr": "10.0.0.0/8"}, "at '/config': additional properties 'clusterCidr' not allowed"),
    ({"kproxy": {"liveSwitch": True}}, "at '/config/kproxy': additional properties 'liveSwitch' not allowed"),
    ({"conntrack": {"min": "many"}}, "at '/config/conntrack/min': got string, want integer"),
    ({"conntrack": {"min": 2**31}}, "at '/config/conntrack/min': maximum"),
    ({"conntrack": {"udpTimeout": 30}}, "at '/config/conntrack/udpTimeout': got number, want string"),
    ({"ipvs": {"syncPeriod": "30"}}, "at '/config/ipvs/syncPeriod': '30' does not match pattern"),
    ({"oomScoreAdj": 1001}, "at '/config/oomScoreAdj': maximum"),
    ({"detectLocalMode": "Cluster"}, "at '/config/detectLocalMode': value must be one of"),
    ({"kproxy": {"modeFallback": "maybe"}}, "at '/config/kproxy/modeFallback': value must be one of"),
    ({"kproxy": {"trafficMetrics": True}}, "at '/config/kproxy/trafficMetrics': value must be one of"),
    ({"nodePortAddresses": "10.0.0.0/8"}, "at '/config/nodePortAddresses': got string, want"),
    ({"featureGates": {"AllAlpha": "true"}}, "at '/config/featureGates/AllAlpha': got string, want boolean"),
    ({"logging": {"vmodule": [{"pattern": "*"}]}}, "at '/config/logging/vmodule/0'"),
], ids=json.dumps)  # fmt: skip
def test_what_kproxy_would_refuse_or_ignore_is_refused(config: Object, complaint: str) -> None:
    done = helm("template", "kproxy", str(CHART), values={"config": config})
    assert done.returncode != 0
    assert complaint in done.stderr
    mode = {config.get("mode"), *config.get("kproxy", {}).get("switchModes", [])} - {None}
    assert mode or is_refused_or_noted(config)  # What modes there are is known to the process alone.


def is_refused_or_noted(config: Object) -> bool:
    about = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    try:
        return bool(resolve(Flags({}), decode(json.dumps(about | config))).notices)
    except ConfigError:
        return True


@pytest.mark.parametrize("config", [
    {"mode": ""},
    {"mode": "mine", "kproxy": {"plugins": ["mine"], "switchModes": ["nftables", "mine"]}},
    {"kproxy": {"trafficMetrics": False, "endpointHealth": "passive", "lastResort": "5m"}},
    {"logging": {"flushFrequency": 0, "vmodule": [{"filePattern": "*", "verbosity": 1}]}},
    {"ipvs": {"minSyncPeriod": "1m30.5s"}, "udpIdleTimeout": "250ms"},
    {"kproxy": {"backendOptions": {"nftables": {"flowtable": ["eth0"]}}}},
], ids=json.dumps)  # fmt: skip
def test_what_kproxy_takes_is_taken(config: Object) -> None:
    data = yaml.safe_load(chart({"config": config})["ConfigMap"]["data"]["config.conf"])
    assert {name: data[name] for name in config} == config


def test_the_configuration_of_a_kube_proxy_is_taken() -> None:
    config = yaml.safe_load(golden("default-config.yaml").read_text())
    given = {name: value for name, value in config.items() if name not in ("apiVersion", "kind")}
    data = yaml.safe_load(chart({"config": given})["ConfigMap"]["data"]["config.conf"])
    config["clientConnection"]["kubeconfig"] = "/var/lib/kube-proxy/kubeconfig.conf"
    assert data == config


def test_settings_of_the_connection_keep_the_kubeconfig() -> None:
    data = chart({"config": {"clientConnection": {"qps": 50}}})["ConfigMap"]["data"]["config.conf"]
    assert yaml.safe_load(data)["clientConnection"] == {
        "qps": 50, "kubeconfig": "/var/lib/kube-proxy/kubeconfig.conf"}


@pytest.mark.parametrize("text", [
    "0", "-0", "+1s", "1m30s", ".5h", "1.h", "1.5ms", "2us", "2µs", "2μs", "3ns",
    "", "s", "30", "1 s", "1d", "1s-", ".s",
])  # fmt: skip
def test_the_schema_and_kproxy_agree_about_durations(text: str) -> None:
    try:
        Duration.parse(text)
        valid = True
    except ValueError:
        valid = False
    pattern = SCHEMA["definitions"]["duration"]["pattern"]
    assert (re.search(pattern, text) is not None) == valid


def test_a_chart_can_be_part_of_another() -> None:
    assert chart({"global": {"registry": "r"}}) == chart()


@pytest.mark.parametrize(("page", "count"), [("deploy.md", 4), ("clusters.md", 4)])
def test_the_commands_on_the_pages_render(page: str, count: int) -> None:
    commands = re.findall(r"^helm install (.*)$", (DEPLOY.parent / "docs" / page).read_text(), re.MULTILINE)
    assert len(commands) == count
    for command in commands:
        done = subprocess.run(
            [program("helm"), "template", *shlex.split(command)], cwd=DEPLOY.parent, capture_output=True,
            text=True, check=False)  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr}"


# -- objects

def test_values_reach_the_objects() -> None:
    objects = chart({
        "config": {"mode": "iptables", "conntrack": {"min": 1}}, "apiServer": "https://[fd00::1]:6443",
        "image": {"repository": "mirror/kproxy", "tag": "9", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "mirror"}], "extraArgs": ["--v=2"],
        "capabilities": ["NET_ADMIN", "NET_RAW"], "nodeSelector": {"proxy": "k"},
        "affinity": {"nodeAffinity": {}}, "tolerations": [{"key": "x"}], "podAnnotations": {"note": "1"},
        "resources": {"limits": {"memory": "2Gi"}}, "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 3},
    }, namespace="network")  # fmt: skip
    for container in containers(objects["DaemonSet"]):
        assert container["image"] == "mirror/kproxy:9"
        assert container["imagePullPolicy"] == "Always"
        assert container["args"][-1] == "--v=2"
    pod = template_of(objects)
    assert pod["metadata"]["annotations"] == {"note": "1"}
    spec = pod["spec"]
    assert spec["imagePullSecrets"] == [{"name": "mirror"}]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux", "proxy": "k"}
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert spec["tolerations"] == [{"key": "x"}]
    assert spec["containers"][0]["securityContext"]["capabilities"]["add"] == ["NET_ADMIN", "NET_RAW"]
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "2Gi"}
    update = objects["DaemonSet"]["spec"]["updateStrategy"]["rollingUpdate"]
    assert update == {"maxSurge": 0, "maxUnavailable": 3}
    assert objects["ClusterRoleBinding"]["subjects"][0]["namespace"] == "network"
    data = objects["ConfigMap"]["data"]
    assert yaml.safe_load(data["config.conf"])["conntrack"] == {"min": 1}
    kubeconfig = yaml.safe_load(data["kubeconfig.conf"])
    assert kubeconfig["clusters"][0]["cluster"]["server"] == "https://[fd00::1]:6443"


def test_a_config_map_that_is_there_is_used() -> None:
    objects = chart({"existingConfigMap": "kube-proxy"})
    assert "ConfigMap" not in objects
    assert template_of(objects)["spec"]["volumes"][0]["configMap"] == {"name": "kube-proxy"}


@pytest.mark.parametrize(("values", "image"), [
    ({}, "kproxy:{version}"),
    ({"ebpf": True}, "kproxy:{version}-ebpf"),
    ({"ebpf": True, "image": {"tag": "mine"}}, "kproxy:mine"),
    ({"image": {"repository": "mirror:5000/kproxy", "digest": DIGEST}}, f"mirror:5000/kproxy@{DIGEST}"),
], ids=["version", "ebpf", "tag", "digest"])  # fmt: skip
def test_the_image_is_the_one_of_the_version_or_the_given_one(values: Object, image: str) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert images(values) == {image.replace("{version}", version)}


def test_labels_are_on_everything_and_never_replace_the_one_that_selects_pods() -> None:
    mine = {"team": "net", "k8s-app": "other"}
    objects = chart(SCRAPED | {
        "labels": mine, "podLabels": {"pod": "yes", "team": "pods"}, "prometheusRule": {"enabled": True}})
    for of in objects.values():
        assert of["metadata"]["labels"] == {"k8s-app": "kproxy", "team": "net"}
    assert template_of(objects)["metadata"]["labels"] == {"k8s-app": "kproxy", "team": "pods", "pod": "yes"}
    assert objects["DaemonSet"]["spec"]["selector"] == {"matchLabels": {"k8s-app": "kproxy"}}


@pytest.mark.parametrize("create", [True, False])
def test_the_service_account_is_made_or_used(create: bool) -> None:
    account = {"create": create, "name": "proxies", "annotations": {"role": "r"}}
    objects = chart({"serviceAccount": account})
    assert template_of(objects)["spec"]["serviceAccountName"] == "proxies"
    (subject,) = objects["ClusterRoleBinding"]["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", "proxies")
    assert ("ServiceAccount" in objects) == create
    if create:
        made = objects["ServiceAccount"]["metadata"]
        assert (made["name"], made["annotations"]) == ("proxies", {"role": "r"})


# -- monitoring

def test_prometheus_gets_nothing_by_default() -> None:
    assert {"PodMonitor", "PrometheusRule"} & chart().keys() == set()


def test_the_rules_are_those_of_the_file() -> None:
    rule = chart({"prometheusRule": {"enabled": True, "labels": {"release": "p"}}})["PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((DEPLOY / "monitoring/rules.yaml").read_text())
    assert rule["metadata"]["labels"] == {"k8s-app": "kproxy", "release": "p"}


@pytest.mark.parametrize(("address", "target"), [
    ("192.0.2.7", "192.0.2.7:9999"), ("2001:db8::7", "[2001:db8::7]:9999"),
])  # fmt: skip
def test_the_pods_are_scraped_once_where_their_metrics_are(address: str, target: str) -> None:
    how = {"enabled": True, "port": 9999, "interval": "15s", "labels": {"release": "p"}}
    monitor = chart(SCRAPED | {"podMonitor": how})["PodMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "p"
    assert monitor["spec"]["selector"] == {"matchLabels": {"k8s-app": "kproxy"}}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["interval"] == "15s"
    # Prometheus finds a target for each container, with the pod's address where none declares a port.
    found = {"__address__": address, "__meta_kubernetes_pod_ip": address,
             "__meta_kubernetes_pod_node_name": "n", "__meta_kubernetes_pod_container_init": "false"}
    assert relabelled(found, endpoint["relabelings"]) == found | {"__address__": target, "node": "n"}
    found["__meta_kubernetes_pod_container_init"] = "true"
    assert relabelled(found, endpoint["relabelings"]) is None


def relabelled(labels: dict[str, str], rules: list[Any]) -> dict[str, str] | None:
    """Apply *rules* as Prometheus does: a regular expression has to match the whole of a value."""
    labels = dict(labels)
    for rule in rules:
        value = ";".join(labels[name] for name in rule["sourceLabels"])
        match = re.fullmatch(rule.get("regex", "(.*)"), value)
        if match and rule.get("action") == "drop":
            return None
        if match:
            labels[rule["targetLabel"]] = match.expand(rule.get("replacement", "$1").replace("$", "\\"))
    return labels


# -- notes

@pytest.mark.parametrize(("values", "warned"), [
    ({"apiServer": "https://192.0.2.10:6443"}, []),
    ({}, ["set apiServer"]),
    ({"existingConfigMap": "kube-proxy", "ebpf": True}, []),
    ({"apiServer": "https://192.0.2.10:6443", "ebpf": True}, ["selects nftables"]),
    ({"apiServer": "https://192.0.2.10:6443", "ebpf": True, "config": {"mode": "ebpf"}}, []),
], ids=json.dumps)  # fmt: skip
def test_the_notes_warn_of_what_cannot_work(values: Object, warned: list[str]) -> None:
    done = helm("install", "kproxy", str(CHART), "--namespace=network", "--dry-run=client", values=values)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("\nNOTES:\n")[2]
    assert "kubectl -n network rollout status daemonset kproxy" in notes
    assert notes.count("WARNING") == len(warned)
    for text in warned:
        assert text in notes

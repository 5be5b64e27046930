"""The files under ``deploy/`` are consistent with each other and with the program."""

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kproxy_core.config.file import load
from kproxy_core.config.flags import Flags
from kproxy_core.config.release import SOURCES
from kproxy_core.config.settings import resolve, written
from kproxy_core.kube.decode import ENDPOINT_SLICES, NODES, SERVICE_CIDRS, SERVICES
from tests.core.golden import golden
from tests.deploy.objects import DEPLOY, Object, base, chart, containers, kustomized

TAG = "dev" if ".dev" in SOURCES else SOURCES
"""The tag of the image: in a release its version."""


def pod_of(objects: dict[str, Object]) -> Object:
    pod: Object = objects["DaemonSet"]["spec"]["template"]["spec"]
    return pod


def test_the_chart_makes_the_same_objects_as_the_base() -> None:
    ours, theirs = base(), chart()
    for container in containers(theirs["DaemonSet"]):
        assert container.pop("imagePullPolicy") == "IfNotPresent"
    for objects in (ours, theirs):
        data = objects["ConfigMap"]["data"]
        objects["ConfigMap"]["data"] = {name: yaml.safe_load(text) for name, text in data.items()}
    assert theirs == ours


def test_the_files_deploy_this_version() -> None:
    about = yaml.safe_load((DEPLOY / "chart/Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (("0.0.0-dev", TAG) if TAG == "dev" else (TAG, TAG))
    assert {container["image"] for container in containers(base()["DaemonSet"])} == {f"kproxy:{TAG}"}
    for page in ("docs/deploy.md", "docs/clusters.md"):
        text = (DEPLOY.parent / page).read_text()
        assert set(re.findall(r"\bkproxy:(dev|\d[\w.]+)", text)) == {TAG}


def test_kustomize_makes_the_same_objects_of_the_base() -> None:
    assert kustomized(DEPLOY / "base") == base()


def test_the_overlay_for_kubeadm_uses_its_config_map_on_chosen_nodes() -> None:
    daemon_set, deleted = patched(base()["DaemonSet"], "kubeadm")
    pod = daemon_set["spec"]["template"]["spec"]
    assert pod["volumes"][0] == {"name": "config", "configMap": {"name": "kube-proxy"}}
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "service-proxy": "kproxy"}
    assert deleted == ["ConfigMap"]


def test_the_component_for_ebpf_adds_what_the_chart_adds(tmp_path: Path) -> None:
    places = {name: os.path.relpath(DEPLOY / name, tmp_path.resolve()) for name in ("kubeadm", "ebpf")}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({
        "resources": [places["kubeadm"]], "components": [places["ebpf"]],
        "images": [{"name": "kproxy", "newName": "registry.example/kproxy"}]}))
    theirs = chart({
        "ebpf": True, "existingConfigMap": "kube-proxy", "nodeSelector": {"service-proxy": "kproxy"},
        "image": {"repository": "registry.example/kproxy"}})["DaemonSet"]
    for container in containers(theirs):
        del container["imagePullPolicy"]
        assert container["image"] == f"registry.example/kproxy:{TAG}-ebpf"
    assert kustomized(tmp_path)["DaemonSet"] == theirs
    (main,) = theirs["spec"]["template"]["spec"]["containers"]
    assert main["securityContext"]["capabilities"]["add"] == ["NET_ADMIN", "BPF"]


def test_the_component_for_seccomp_names_a_profile_that_exists() -> None:
    daemon_set, _ = patched(base()["DaemonSet"], "seccomp")
    profile = daemon_set["spec"]["template"]["spec"]["securityContext"]["seccompProfile"]
    assert profile == {"type": "Localhost", "localhostProfile": "kproxy/kproxy.json"}
    assert (DEPLOY / "seccomp" / Path(profile["localhostProfile"]).name).exists()
    assert pod_of(chart({"seccompProfile": profile}))["securityContext"]["seccompProfile"] == profile


def patched(daemon_set: Object, overlay: str) -> tuple[Object, list[str]]:
    """Return *daemon_set* with the patches of an overlay, and the kinds that it deletes."""
    kustomization = yaml.safe_load((DEPLOY / overlay / "kustomization.yaml").read_text())
    result = copy.deepcopy(daemon_set)
    deleted = []
    for patch in kustomization["patches"]:
        content = yaml.safe_load(patch["patch"])
        if isinstance(content, dict):
            assert content["$patch"] == "delete"
            deleted.append(content["kind"])
            continue
        for operation in content:
            *path, last = operation["path"].removeprefix("/").split("/")
            at: Any = result
            for step in path:
                at = at[int(step)] if isinstance(at, list) else at[step]
            if last == "-":
                at.append(operation["value"])
            else:
                assert (last in at) == (operation["op"] == "replace")
                at[last] = operation["value"]
    return result, deleted


def test_the_role_allows_exactly_the_requests_made() -> None:
    allowed = {
        (group, resource, verb)
        for rule in base()["ClusterRole"]["rules"]
        for group in rule["apiGroups"] for resource in rule["resources"] for verb in rule["verbs"]
    }  # fmt: skip
    kinds = (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS)
    asked = {
        (kind.api_version.rpartition("/")[0], kind.plural, verb)
        for kind in kinds for verb in ("list", "watch")
    }
    assert allowed == asked | {("events.k8s.io", "events", "create")}


def test_the_configuration_is_one(tmp_path: Path) -> None:
    for objects in (base(), chart()):
        path = tmp_path / "config.conf"
        path.write_text(objects["ConfigMap"]["data"]["config.conf"])
        loaded = load(str(path))
        assert loaded.notices == ()
        assert loaded.document.client_connection.kubeconfig == "/var/lib/kube-proxy/kubeconfig.conf"
        kubeconfig = yaml.safe_load(objects["ConfigMap"]["data"]["kubeconfig.conf"])
        assert kubeconfig["current-context"] == kubeconfig["contexts"][0]["name"]


def test_the_file_that_kubeadm_writes_means_kube_proxys_defaults() -> None:
    """Its zeros and nulls stand for the defaults, also where they are of another type."""
    loaded = load(str(Path(__file__).with_name("kubeadm.conf")))
    config = resolve(Flags({}), loaded)
    assert config.notices == ()
    default = yaml.safe_load(golden("default-config.yaml").read_text())
    default["clientConnection"]["kubeconfig"] = "/var/lib/kube-proxy/kubeconfig.conf"
    default["clusterCIDR"] = "10.244.0.0/16"
    assert yaml.safe_load(written(config)) == default


def test_files_named_on_the_page_exist() -> None:
    page = (DEPLOY.parent / "docs/deploy.md").read_text()
    for name in re.findall(r"(?<!tests/)\bdeploy/[\w./-]+", page):
        assert (DEPLOY.parent / name.rstrip(".")).exists(), name
    for test in re.findall(r"tests/deploy/(\w+\.py)", page):
        assert (Path(__file__).parent / test).exists()
    (patch,) = re.findall(r"-p '(.*)'", page)
    affinity = json.loads(patch)["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "service-proxy", "operator": "NotIn", "values": ["kproxy"]}]
    assert "kubectl label node \"$NODE\" service-proxy=kproxy\n" in page


@pytest.mark.parametrize("made", [base, chart])
def test_pods_have_the_properties_of_a_node_agent(made: Callable[[], dict[str, Object]]) -> None:
    objects = made()
    pod = pod_of(objects)
    assert pod["hostNetwork"] is True
    assert pod["priorityClassName"] == "system-node-critical"
    assert pod["tolerations"] == [{"operator": "Exists"}]
    (main,) = pod["containers"]
    assert main["livenessProbe"]["httpGet"] == {"path": "/livez", "port": 10256}
    assert main["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": 10256}
    assert main["resources"]["limits"] == {"memory": "1Gi"}
    assert "privileged" not in main["securityContext"]
    for container in containers(objects["DaemonSet"]):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


@pytest.mark.parametrize("made", [base, chart])
def test_the_next_pod_can_start_beside_the_old_one(made: Callable[[], dict[str, Object]]) -> None:
    """On the host's network a container's ports are ports of the host, and no two pods of a node have one."""
    objects = made()
    spec = objects["DaemonSet"]["spec"]
    update = spec["updateStrategy"]["rollingUpdate"]
    assert update["maxUnavailable"] == 0, "a DaemonSet may have only one of the two"
    assert update["maxSurge"] != 0
    assert spec["minReadySeconds"] > 0, "the old pod's process answers the probes of one that keeps crashing"
    for container in containers(objects["DaemonSet"]):
        assert "ports" not in container
        for probe in ("livenessProbe", "readinessProbe"):
            assert isinstance(container.get(probe, {"httpGet": {"port": 0}})["httpGet"]["port"], int)

"""kproxy as the DaemonSet of deploy/, unchanged but for the settings that every cluster has."""

import json
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from tests.cluster.cluster import SERVER, Cluster
from tests.cluster.fabric import PODS
from tests.cluster.images import CHECKOUT
from tests.deploy.objects import base, containers

IMAGE = f"docker.io/library/{containers(base()['DaemonSet'])[0]['image']}"
KUBE_PROXY = "docker.io/library/kube-proxy:1.36"
_NAMESPACE = "kube-system"
_KUBE_PROXY_OBJECTS = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: kube-proxy, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: kube-proxy}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:node-proxier"}
subjects: [{kind: ServiceAccount, name: kube-proxy, namespace: kube-system}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-proxy, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy}}
  template:
    metadata: {labels: {k8s-app: kube-proxy}}
    spec:
      hostNetwork: true
      serviceAccountName: kube-proxy
      tolerations: [{operator: Exists}]
      containers:
        - name: kube-proxy
          image: %(image)s
          command: [/kube-proxy, "--proxy-mode=%(mode)s", "--cluster-cidr=%(pods)s",
                    --conntrack-max-per-core=0, --hostname-override=$(NODE)]
          env:
            - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
            - {name: KUBERNETES_SERVICE_HOST, value: "%(host)s"}
            - {name: KUBERNETES_SERVICE_PORT, value: "%(port)s"}
          securityContext: {privileged: true}
          readinessProbe: {httpGet: {path: /healthz, port: 10256}}
"""
"""As kubeadm deploys it, but with the settings on the command line."""


def deploy(cluster: Cluster, mode: str) -> None:
    """Apply the DaemonSet with *mode*, and wait until its pods are ready on every node."""
    cluster.kubectl("-n", _NAMESPACE, "delete", "daemonset/kube-proxy", "--ignore-not-found", "--wait=true")
    overlay = cluster.directory / f"kproxy-{mode}"
    overlay.mkdir(exist_ok=True)
    _write_overlay(overlay, mode)
    cluster.apply(cluster.kubectl("kustomize", str(overlay)))
    _wait_until_ready(cluster, "kproxy")
    nodes = json.loads(fleet(cluster, "status", "-o", "json"))["nodes"]
    if {node.get("mode") for node in nodes} != {mode}:
        raise RuntimeError(f"kproxy does not serve in {mode} mode: {nodes}")


def deploy_kube_proxy(cluster: Cluster, mode: str) -> None:
    """Apply kube-proxy's DaemonSet with *mode*, and wait until its pods are ready on every node."""
    api = urlsplit(SERVER)
    cluster.apply(_KUBE_PROXY_OBJECTS % {
        "image": KUBE_PROXY, "mode": mode, "pods": ",".join(PODS), "host": api.hostname, "port": api.port})
    _wait_until_ready(cluster, "kube-proxy")


def _wait_until_ready(cluster: Cluster, proxy: str) -> None:
    cluster.kubectl("-n", _NAMESPACE, "rollout", "status", f"daemonset/{proxy}", "--timeout=300s")


def restart(cluster: Cluster) -> None:
    """Replace every pod of kproxy, one after another."""
    cluster.kubectl("-n", _NAMESPACE, "rollout", "restart", "daemonset/kproxy")
    _wait_until_ready(cluster, "kproxy")


def _write_overlay(directory: Path, mode: str) -> None:
    config = yaml.safe_load((CHECKOUT / "deploy" / "base" / "config.conf").read_text())
    config |= {"mode": mode, "clusterCIDR": ",".join(PODS)}
    config["kproxy"] = {"switchModes": ["nftables", "iptables"]}
    (directory / "config.conf").write_text(yaml.safe_dump(config))
    kubeconfig = yaml.safe_load((CHECKOUT / "deploy" / "base" / "kubeconfig.conf").read_text())
    kubeconfig["clusters"][0]["cluster"]["server"] = SERVER
    (directory / "kubeconfig.conf").write_text(yaml.safe_dump(kubeconfig))
    (directory / "kustomization.yaml").write_text(json.dumps({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": _NAMESPACE,
        "resources": [os.path.relpath(CHECKOUT / "deploy" / "base", directory)],
        "components": [os.path.relpath(CHECKOUT / "deploy" / "ebpf", directory)] if mode == "ebpf" else [],
        "configMapGenerator": [
            {"name": "kproxy", "behavior": "replace", "files": ["config.conf", "kubeconfig.conf"]}]}))


def fleet(cluster: Cluster, *arguments: str) -> str:
    """Return the output of `kubectl kproxy`. Raises CommandFailed."""
    program = Path(sys.executable).with_name("kubectl-kproxy")
    return cluster.home.run(
        "env", f"KUBECONFIG={cluster.kubeconfig}", str(program), *arguments, timeout=900)

"""kproxy as the DaemonSet of deploy/, unchanged but for the settings that every cluster has."""

import json
import os
from pathlib import Path

import yaml

from tests.cluster.cluster import SERVER, Cluster
from tests.cluster.fabric import PODS
from tests.cluster.images import CHECKOUT

IMAGE = "docker.io/library/kproxy:0.2.0"
_NAMESPACE = "kube-system"


def deploy(cluster: Cluster, mode: str) -> None:
    """Apply the DaemonSet with *mode*, and wait until its pods are ready on every node."""
    overlay = cluster.directory / f"kproxy-{mode}"
    overlay.mkdir(exist_ok=True)
    _write_overlay(overlay, mode)
    # Kubernetes built with another Go than its release may lack schemas.
    cluster.kubectl("apply", "--validate=false", "-k", str(overlay))
    wait_until_ready(cluster)


def wait_until_ready(cluster: Cluster) -> None:
    cluster.kubectl("-n", _NAMESPACE, "rollout", "status", "daemonset/kproxy", "--timeout=300s")


def restart(cluster: Cluster) -> None:
    """Replace every pod of kproxy, one after another."""
    cluster.kubectl("-n", _NAMESPACE, "rollout", "restart", "daemonset/kproxy")
    wait_until_ready(cluster)


def _write_overlay(directory: Path, mode: str) -> None:
    base = CHECKOUT / "deploy" / ("ebpf" if mode == "ebpf" else "base")
    config = yaml.safe_load((CHECKOUT / "deploy" / "base" / "config.conf").read_text())
    config |= {"mode": mode, "clusterCIDR": ",".join(PODS)}
    config["kproxy"] = {"switchModes": ["nftables", "iptables"]}
    (directory / "config.conf").write_text(yaml.safe_dump(config))
    kubeconfig = yaml.safe_load((CHECKOUT / "deploy" / "base" / "kubeconfig.conf").read_text())
    kubeconfig["clusters"][0]["cluster"]["server"] = SERVER
    (directory / "kubeconfig.conf").write_text(yaml.safe_dump(kubeconfig))
    (directory / "kustomization.yaml").write_text(json.dumps({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": _NAMESPACE,
        "resources": [os.path.relpath(base, directory)],
        "configMapGenerator": [
            {"name": "kproxy", "behavior": "replace", "files": ["config.conf", "kubeconfig.conf"]}]}))

"""The objects under ``deploy/``: as files, and as kustomize and Helm make them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.programs import program

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "chart"

Object = dict[str, Any]


def base() -> dict[str, Object]:
    """The objects of the kustomize base by kind, the generated ConfigMap included."""
    kustomization = yaml.safe_load((DEPLOY / "base/kustomization.yaml").read_text())
    objects = [
        found
        for name in kustomization["resources"]
        for found in yaml.safe_load_all((DEPLOY / "base" / name).read_text())
    ]
    (generated,) = kustomization["configMapGenerator"]
    data = {name: (DEPLOY / "base" / name).read_text() for name in generated["files"]}
    metadata = {"name": generated["name"]}
    objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for of in objects:
        if of["kind"] not in ("ClusterRole", "ClusterRoleBinding"):
            of["metadata"]["namespace"] = kustomization["namespace"]
        of["metadata"]["labels"] = kustomization["labels"][0]["pairs"]
    images = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in kustomization["images"]}
    for container in containers(daemon_set := by_kind(objects)["DaemonSet"]):
        container["image"] = images[container["image"]]
    assert daemon_set["metadata"]["namespace"] == "kube-system"
    return by_kind(objects)


def chart(values: Object | None = None, namespace: str = "kube-system") -> dict[str, Object]:
    """Return the objects by kind that Helm makes of the chart, with *values* merged into its own."""
    done = helm("template", "kproxy", str(CHART), f"--namespace={namespace}", values=values)
    assert done.returncode == 0, done.stderr
    return by_kind([found for found in yaml.safe_load_all(done.stdout) if found])


def helm(*arguments: str, values: Object | None = None) -> "subprocess.CompletedProcess[str]":
    """Run Helm with *values* for the chart."""
    return subprocess.run(
        [program("helm"), *arguments, "--values=-"], input=json.dumps(values or {}), capture_output=True,
        text=True, check=False)  # fmt: skip


def built(directory: Path) -> dict[str, Object]:
    """Return the objects by kind that kustomize makes of *directory*."""
    done = subprocess.run(
        [program("kubectl"), "kustomize", directory], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return by_kind(list(yaml.safe_load_all(done.stdout)))


def kustomized(directory: Path) -> dict[str, Object]:
    """Return the objects of `built` without the hash in the ConfigMap's name."""
    objects = built(directory)
    if "ConfigMap" in objects:
        hashed = objects["ConfigMap"]["metadata"]["name"]
        text = json.dumps(objects).replace(hashed, hashed.rpartition("-")[0])
        objects = json.loads(text)
    return objects


def containers(daemon_set: Object) -> list[Object]:
    """All containers of its pods, those that only begin included."""
    pod = daemon_set["spec"]["template"]["spec"]
    return [*pod["initContainers"], *pod["containers"]]


def by_kind(objects: list[Object]) -> dict[str, Object]:
    found = {of["kind"]: of for of in objects}
    assert len(found) == len(objects), "two objects of one kind"
    return found


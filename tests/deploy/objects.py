"""The objects under ``deploy/``: as files, and as the chart makes them of its values."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"

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


def chart(namespace: str = "kube-system", **values: object) -> dict[str, Object]:
    """Return the chart's objects by kind, with *values* in place of its own of the same name."""
    defaults = yaml.safe_load((DEPLOY / "chart/values.yaml").read_text())
    assert values.keys() <= defaults.keys()
    scope = {"Values": defaults | values, "Release": {"Namespace": namespace}}
    templates = sorted((DEPLOY / "chart/templates").glob("*.yaml"))
    texts = [_Template(path.read_text(), scope).render() for path in templates]
    return by_kind([found for text in texts for found in yaml.safe_load_all(text) if found])


def containers(daemon_set: Object) -> list[Object]:
    """All containers of its pods, those that only begin included."""
    pod = daemon_set["spec"]["template"]["spec"]
    return [*pod["initContainers"], *pod["containers"]]


def by_kind(objects: list[Object]) -> dict[str, Object]:
    found = {of["kind"]: of for of in objects}
    assert len(found) == len(objects), "two objects of one kind"
    return found


class _Template:
    """As much of Helm's language as the chart uses: values, if, not, default, toYaml, nindent."""

    def __init__(self, text: str, scope: Object) -> None:
        self._scope = scope
        parts = re.split(r"\{\{(-?) (.*?) \}\}", text)
        for at in range(1, len(parts), 3):
            if parts[at]:
                parts[at - 1] = parts[at - 1].rstrip()
        self._texts = parts[::3]
        self._actions = parts[2::3]
        assert "{{" not in "".join(self._texts), "an action in a form that the chart does without"

    def render(self) -> str:
        return "".join(self._rendered())

    def _rendered(self) -> Iterator[str]:
        shown = [True]
        for text, action in zip(self._texts, [*self._actions, ""], strict=True):
            if shown[-1]:
                yield text
            if action.startswith("if "):
                shown.append(shown[-1] and bool(self._value(action.removeprefix("if "))))
            elif action == "end":
                shown.pop()
            elif action and shown[-1]:
                value = self._value(action)
                yield value if isinstance(value, str) else json.dumps(value)
        assert shown == [True], "if without end"

    def _value(self, pipeline: str) -> object:
        first, *functions = pipeline.split(" | ")
        value = self._term(first)
        for function in functions:
            name, argument = function.split(" ", 1)
            if name == "default":
                value = value or json.loads(argument)
            elif name == "nindent":
                assert isinstance(value, str)
                value = "\n" + "\n".join(" " * int(argument) + line for line in value.splitlines())
            else:
                raise AssertionError(f"the chart does without {name}")
        return value

    def _term(self, term: str) -> object:
        if term.startswith("not "):
            return not self._term(term.removeprefix("not "))
        if term.startswith("toYaml "):
            return yaml.safe_dump(self._term(term.removeprefix("toYaml ")), sort_keys=False).strip()
        value: Any = self._scope
        for name in term.removeprefix(".").split("."):
            value = value[name]
        return value

"""The cluster that a kubeconfig names."""

import json
from pathlib import Path

import pytest

from kproxy_core.fleet.cluster import Cluster

NAMESPACES = {"": "shop", "here": "shop", "there": "default"}
"""By --context."""


@pytest.mark.parametrize("context", NAMESPACES)
def test_objects_without_a_namespace_are_in_that_of_the_context(tmp_path: Path, context: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "here", "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "shop"}},
                     {"name": "there", "context": {"cluster": "c", "user": "u"}}]}))
    assert Cluster(str(path), context).default_namespace == NAMESPACES[context]

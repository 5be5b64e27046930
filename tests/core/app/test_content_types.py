"""What the API server is asked for, by configuration."""

from pathlib import Path

import pytest

from kproxy_core.app.assembly import make_source
from kproxy_core.config.file import load
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import resolve
from kproxy_core.kube.access import CurrentAccess
from kproxy_core.kube.transport import JSON, PROTOBUF_OR_JSON, without_managed_fields
from tests.core.api_servers import ScriptedServer
from tests.core.kube.observed_events import following

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


@pytest.mark.parametrize(("client", "accept"), [
    ("{}", PROTOBUF_OR_JSON),
    ("{contentType: ''}", PROTOBUF_OR_JSON),
    ("{contentType: application/json}", JSON),
    ("{contentType: application/cbor}", JSON),
    ("{acceptContentTypes: application/json}", JSON),
    ("{acceptContentTypes: application/vnd.kubernetes.protobuf, contentType: application/json}",
     PROTOBUF_OR_JSON),
])
def test_protobuf_unless_json_is_configured(tmp_path: Path, client: str, accept: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{HEAD}clientConnection: {client}\n")
    server = ScriptedServer({})
    try:
        source = make_source(
            resolve(Flags(), load(str(file))), "n", CurrentAccess(server.url, None), lambda request: None)
        with following(source) as observed:
            observed.wait_for(lambda _: server.asked("services"))
        assert {request.headers["accept"] for request in server.requests} == {without_managed_fields(accept)}
    finally:
        server.close()

"""A port that another program has, as the operator sees it."""

import socket
from pathlib import Path

import pytest

from .endpoints import endpoints, reached
from .program import manifests, metric, problems, program, until

HOST = "192.0.2.2"
NAME = f"{HOST}:9001"
TAKEN, FREE = 30080, 30081

pytestmark = pytest.mark.usefixtures("node")


def test_a_port_in_use_is_reported_and_served_once_free(tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    objects.mkdir()
    (objects / "one.yaml").write_text(manifests("one", "10.96.0.1", HOST, node_port=TAKEN))
    with endpoints((HOST, 9001)), socket.create_server(("0.0.0.0", TAKEN)) as other, program(objects):
        until(lambda: bool(problems()))
        assert problems() == [
            f"IPv4: not served: default/one: TCP port {TAKEN} of this node: Address already in use"]
        assert metric("kproxy_userspace_unserved_service_ports") == 1
        until(lambda: metric("kproxy_sync_retries_total") >= 3)
        assert reached("10.96.0.1", 80) == NAME
        (objects / "two.yaml").write_text(manifests("two", "10.96.0.2", HOST, node_port=FREE))
        until(lambda: reached("192.0.2.1", FREE) == reached("10.96.0.2", 80) == NAME)
        assert len(problems()) == 1
        other.close()
        until(lambda: not problems())
        assert reached("192.0.2.1", TAKEN) == NAME
        assert metric("kproxy_userspace_unserved_service_ports") == 0

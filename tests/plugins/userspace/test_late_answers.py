"""Late UDP answers, also from endpoints that were removed in between."""

import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kproxy_conformance.builders import service
from tests.patience import PATIENCE

from .program import manifests, metric, problems, program, until
from .proxies import Start

HOSTS = ("192.0.2.2", "192.0.2.3")
VIP = "10.96.0.1"
CLEANED = "kubeproxy_conntrack_reconciler_sync_duration_seconds_count"
AT_START = 3
"""Cleanups: of UDP flows, and of TCP connections that are older than the rules of either family."""

pytestmark = pytest.mark.usefixtures("node")


def udp(*place: str | int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(PATIENCE)
    if place:
        sock.bind(place)
    return sock


def test_an_answer_arrives_after_its_endpoint_was_removed(tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    objects.mkdir()

    def serve(*hosts: str) -> None:
        beside = tmp_path / "dns.yaml"
        beside.write_text(manifests("dns", VIP, *hosts, port=53, protocol="UDP", node_port=30053))
        os.replace(beside, objects / "dns.yaml")

    serve(HOSTS[0])
    first, second, client = udp(HOSTS[0], 9001), udp(HOSTS[1], 9001), udp()
    with first, second, client, program(objects, "--udp-timeout=1h"):
        until(lambda: metric(CLEANED) == AT_START)
        client.connect((VIP, 53))
        client.send(b"question")
        question, relay = first.recvfrom(100)
        serve(HOSTS[1])
        until(lambda: metric(CLEANED) > AT_START)
        first.sendto(b"answer", relay)
        assert (question, client.recv(100)) == (b"question", b"answer")
        client.send(b"another")
        question, relay = second.recvfrom(100)
        second.sendto(b"its answer", relay)
        assert (question, client.recv(100)) == (b"another", b"its answer")


def test_a_client_that_began_while_rules_were_missing_is_served_once_they_are_back(tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    objects.mkdir()
    (objects / "dns.yaml").write_text(
        manifests("dns", VIP, HOSTS[0], port=53, protocol="UDP", node_port=30053))
    with udp(HOSTS[0], 9001) as endpoint, udp() as client, program(objects):
        until(lambda: metric(CLEANED) > 0 and problems() == [])  # Ready: it notices foreign changes.
        endpoint.settimeout(0.1)
        client.connect(("192.0.2.1", 30053))
        subprocess.run(["iptables", "-w", "-t", "nat", "-F", "KUBE-NODEPORT-HOST"], check=True)

        deadline = time.monotonic() + PATIENCE
        arrived = b""
        while not arrived and time.monotonic() < deadline:
            with suppress(OSError):  # It never pauses, so conntrack does not forget its first datagram.
                client.send(b"question")
                arrived = endpoint.recv(100)
        assert arrived == b"question"


def test_a_client_that_awaits_an_answer_is_not_idle(start: Start) -> None:
    with udp(HOSTS[0], 9001) as endpoint, udp() as client:
        start(udpIdleTimeout="50ms").serve(service("dns", "53/UDP"), HOSTS[0], ports="9001/UDP")
        client.connect((VIP, 53))
        client.send(b"question")
        question, relay = endpoint.recvfrom(100)
        time.sleep(0.5)
        endpoint.sendto(b"answer", relay)
        assert (question, client.recv(100)) == (b"question", b"answer")

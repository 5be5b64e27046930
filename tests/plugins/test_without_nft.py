"""Modes on a node without nft and libnftables, beside a table on which older releases of these crash."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.core.bpf_places import inside
from tests.core.processes import KPROXY, Proxy, started
from tests.nft_releases.releases import BOOKWORM, TRIXIE
from tests.plugins.ebpf.node import REMOTE, REMOTE6, Node, node, until

VIP, VIP6, EMPTY = "10.96.0.10", "fd00:96::10", "10.96.0.11"
METRICS = 10249

HIDE = "for path in {}; do [ ! -e $path ] || mount --bind /dev/null $(realpath $path); done\n"
"""A command of a shell that has mounts of its own."""
NFT = HIDE.format("/usr/sbin/nft /usr/lib/*/libnftables.so.1")
IPTABLES = HIDE.format("/usr/sbin/xtables-*-multi")
OPTIONS = {"userspace": {"bindAddress": "203.0.113.1"}}


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Node]:
    """A node with a table of another program that nft 1.1.3 has written, and nft 1.0.6 cannot read."""
    with node(tmp_path) as made:
        made.serve("web", VIP, REMOTE[:1])
        made.serve("web6", VIP6, REMOTE6[:1])
        made.serve("empty", EMPTY, [])
        made.host.run(TRIXIE.nft, "add table ip foreign; add set ip foreign s { type ifname; }")
        crashed = made.host.inside(lambda: BOOKWORM.run("list", "tables"))
        assert crashed.returncode == -signal.SIGSEGV
        yield made


def command(where: Node, mode: str, *arguments: str, hide: str = NFT) -> list[str]:
    """Return the command that runs kproxy on the node, without the programs to *hide*."""
    places = {"cgroup": str(where.cgroup), "pinDirectory": str(where.pins)} if mode == "ebpf" else {}
    where.config.write_text(json.dumps({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "mode": mode, "clusterCIDR": "10.244.0.0/16,fd00:244::/32", "conntrack": {"maxPerCore": 0},
        "kproxy": {
            "stateDirectory": str(where.config.with_name("state")), "trafficMetrics": "service",
            "backendOptions": {mode: {**places, **OPTIONS.get(mode, {})}},
        },
    }))  # fmt: skip
    kproxy = [KPROXY, "--config", str(where.config), *arguments]
    return inside(where.cgroup, [
        "ip", "netns", "exec", where.host.name, "sh", "-ec", f'{hide}exec "$@"', "-", *kproxy])


@contextmanager
def serving(where: Node, mode: str, hide: str = NFT) -> Iterator[Proxy]:
    objects = ("--manifests", str(where.manifests), "--hostname-override", "here")
    with started(where.host, command(where, mode, *objects, hide=hide)) as proxy:
        proxy.await_health()
        yield proxy


@contextmanager
def dialled(where: Node, address: str) -> Iterator[int]:
    """Yield the port of a client on the node to whom an endpoint behind port 80 of *address* has answered."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with where.sockets(where.host).open(family, socket.SOCK_STREAM) as client:
        client.connect((address, 80))
        assert client.recv(100).endswith(b"\n")
        yield client.getsockname()[1]


def reach(where: Node, *addresses: str) -> None:
    for address in addresses:
        with dialled(where, address):
            pass


def expect_refusal(where: Node) -> None:
    with pytest.raises(ConnectionRefusedError):
        reach(where, EMPTY)


def tables(where: Node) -> set[str]:
    return set(where.host.run(TRIXIE.nft, "list", "tables").splitlines()) - {"table ip foreign"}


def counted(proxy: Proxy) -> dict[tuple[str, str], int]:
    """Return the connections by Service and outcome."""
    status, text = proxy.get(METRICS, "/metrics")
    assert status == 200
    pattern = r"^kproxy_service_(?:connections|failures)_total\{(.*)\} (\d+)$"
    found = [
        (dict(re.findall(r'(\w+)="([^"]*)"', labels)), int(value))
        for labels, value in re.findall(pattern, text, re.MULTILINE)
    ]
    return {
        (labels["service"], labels.get("outcome") or labels["reason"]): number for labels, number in found}


def clean_up(where: Node, mode: str, hide: str = NFT) -> None:
    with started(where.host, command(where, mode, "--cleanup", hide=hide)) as proxy:
        status, log = proxy.ended()
    assert status == 0, log


def test_portals_without_iptables(where: Node) -> None:
    with serving(where, "userspace", NFT + IPTABLES):
        assert tables(where) == {"table ip kproxy-userspace", "table ip6 kproxy-userspace"}
        reach(where, VIP, VIP6)
        expect_refusal(where)
        where.host.run(TRIXIE.nft, "flush map ip kproxy-userspace vips")
        until(lambda: VIP in where.host.run(TRIXIE.nft, "list", "map", "ip", "kproxy-userspace", "vips"))
        reach(where, VIP)
    clean_up(where, "userspace", NFT + IPTABLES)
    assert tables(where) == set()


def test_counts_of_iptables_mode(where: Node) -> None:
    def expect(number: int) -> None:
        until(lambda: counted(proxy) == {("web", "forwarded"): number, ("empty", "rejected"): number})

    ours = {"table ip kproxy-counts", "table ip6 kproxy-counts"}
    with serving(where, "iptables") as proxy:
        for _ in range(2):
            reach(where, VIP)
            expect_refusal(where)
        expect(2)
    listed = where.host.run(TRIXIE.nft, "list", "table", "ip", "kproxy-counts")
    assert listed.count("counter packets 2 ") == 2
    with serving(where, "iptables"):
        reach(where, VIP)
        listed = where.host.run(TRIXIE.nft, "list", "set", "ip", "kproxy-counts", "connections")
        assert "counter packets 3 " in listed
        assert ours <= tables(where)
    clean_up(where, "iptables")
    assert not ours & tables(where)

"""The mode in the pod that deploy/ makes, whose only capability is CAP_NET_ADMIN: ports below 1024."""

import subprocess
from pathlib import Path

import pytest

from tests.core.namespaces import namespace
from tests.core.processes import KPROXY
from tests.deploy.test_privileges import READY, Pod

NODE, NODE_6 = "192.0.2.1", "2001:db8::1"

MANIFESTS = f"""
apiVersion: v1
kind: Node
metadata: {{name: n}}
status: {{addresses: [{{type: InternalIP, address: {NODE}}}, {{type: InternalIP, address: "{NODE_6}"}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: shop, namespace: shop}}
spec:
  ipFamilies: [IPv4, IPv6]
  clusterIPs: [10.96.0.11, "fd00:96::11"]
  clusterIP: 10.96.0.11
  externalIPs: [{NODE}, "{NODE_6}"]
  ports: [{{name: http, port: 80}}, {{name: dns, port: 53, protocol: UDP}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: shop-1, namespace: shop, labels: {{kubernetes.io/service-name: shop}}}}
addressType: IPv4
endpoints: [{{addresses: [10.1.2.3]}}]
ports: [{{name: http, port: 8080}}, {{name: dns, port: 53, protocol: UDP}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: shop-2, namespace: shop, labels: {{kubernetes.io/service-name: shop}}}}
addressType: IPv6
endpoints: [{{addresses: ["fd00:244::3"]}}]
ports: [{{name: http, port: 8080}}, {{name: dns, port: 53, protocol: UDP}}]
"""


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_the_pod_switches_to_the_mode_with_dual_stack_services_below_port_1024(
    tmp_path: Path, mode: str
) -> None:
    with namespace() as node:
        node.ip(
            "link add node0 type veth peer name lan0", "link set node0 up", "link set lan0 up",
            f"address add {NODE}/24 dev node0",
            f"address add {NODE_6}/64 dev node0 nodad",
        )  # fmt: skip
        pod = Pod(node, tmp_path, mode)
        (tmp_path / "manifests" / "shop.yaml").write_text(MANIFESTS)
        pod.init()
        with pod.main() as proxy:
            proxy.await_health(READY)
            done = subprocess.run(
                ["nsenter", f"--target={proxy.pid}", "--mount", "--net", "--root", "setpriv",
                 "--bounding-set=-all,+net_admin", "--inh-caps=-all", "--no-new-privs",
                 KPROXY, "switch", "userspace"],
                capture_output=True, text=True, check=False, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            for save, vips in (("iptables-save", ("10.96.0.11/32", f"{NODE}/32")),
                               ("ip6tables-save", ("fd00:96::11/128", f"{NODE_6}/128"))):
                portals = node.run(save, "-t", "nat")
                for vip in vips:
                    for port in (80, 53):
                        assert any("KUBE-PORTALS-HOST" in line and f"-d {vip}" in line
                                   and f"--dport {port}" in line for line in portals.splitlines())
            assert "not served" not in proxy.health()[1]

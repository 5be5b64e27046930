"""kube-proxy, fed by an etcd and a kube-apiserver on the node's loopback: the reference for scenarios."""

import http.client
import json
import secrets
import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kproxy_conformance.drivers.driver import DriverError, Process, ProxyDriver, Rejected
from kproxy_conformance.network.addresses import FAMILIES, NODE, resolve
from kproxy_conformance.network.dialing import wait_until
from kproxy_conformance.network.namespaces import Namespace
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.suite.objects import Json, base_objects

_API_PORT, _ETCD_PORT, _ETCD_PEER_PORT = 6443, 2379, 2380
_CONTROL_PLANE_DEADLINE = 60.0
_RESOURCES = {
    "Node": ("/api/v1/", "nodes"),
    "Namespace": ("/api/v1/", "namespaces"),
    "Service": ("/api/v1/", "services"),
    "EndpointSlice": ("/apis/discovery.k8s.io/v1/", "endpointslices"),
    "ServiceCIDR": ("/apis/networking.k8s.io/v1/", "servicecidrs"),
}
_NAMESPACED = ("Service", "EndpointSlice")


class _ApiConnection(http.client.HTTPSConnection):
    """A connection from a host, without a look at the server's certificate."""

    def __init__(self, host: Namespace) -> None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        super().__init__("127.0.0.1", _API_PORT, context=context, timeout=30)
        self._from = host

    def connect(self) -> None:
        with self._from.entered():
            super().connect()


class KubeProxyDriver(ProxyDriver):
    """kube-proxy with a control plane of its own."""

    name = "kube-proxy"

    def __init__(
        self, topology: Topology, directory: Path, command: str = "kube-proxy", *,
        apiserver: str = "kube-apiserver", etcd: str = "etcd",
    ) -> None:  # fmt: skip
        super().__init__(topology, directory, command)
        self._token = secrets.token_hex(16)
        self._connection: _ApiConnection | None = None
        self._namespaces = {"default"}
        self._parts: list[Process] = []
        try:
            self._start_etcd(etcd)
            self._start_apiserver(apiserver)
            self._wait_for_control_plane()
            for obj in base_objects(self.families):
                if obj["kind"] != "ServiceCIDR":  # the API server makes its own
                    self.apply(obj)
        except BaseException:
            self.close()
            raise

    def _start_etcd(self, etcd: str) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (_ETCD_PORT, _ETCD_PEER_PORT))
        argv = [
            etcd, "--data-dir", str(self.directory / "etcd"), "--unsafe-no-fsync",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"default={peer}",
        ]  # fmt: skip
        self._parts.append(Process(self.node, argv, self.directory / "etcd.log"))

    def _start_apiserver(self, apiserver: str) -> None:
        key, tokens = self.directory / "sa.key", self.directory / "tokens.csv"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, stderr=subprocess.DEVNULL)
        tokens.write_text(f"{self._token},conformance,conformance,system:masters\n")
        argv = [
            apiserver, f"--etcd-servers=http://127.0.0.1:{_ETCD_PORT}", "--bind-address=127.0.0.1",
            f"--secure-port={_API_PORT}", f"--cert-dir={self.directory / 'certs'}",
            "--service-cluster-ip-range=" + ",".join(resolve("service_net", f) for f in FAMILIES),
            "--service-account-issuer=https://conformance.invalid",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            f"--token-auth-file={tokens}", "--authorization-mode=AlwaysAllow",
            f"--advertise-address={resolve('node', 'ipv4')}", "--endpoint-reconciler-type=none",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        ]  # fmt: skip
        self._parts.append(Process(self.node, argv, self.directory / "apiserver.log"))

    def _wait_for_control_plane(self) -> None:
        def is_ready() -> bool:
            for part in self._parts:
                if part.exit_status is not None:
                    raise DriverError(f"the control plane failed:\n{part.log_tail()}")
            try:
                return self._request("GET", "/readyz")[0] == 200
            except OSError:
                return False

        if not wait_until(is_ready, _CONTROL_PLANE_DEADLINE, interval=0.2):
            raise DriverError("the API server did not become ready")
        cluster = {"server": f"https://127.0.0.1:{_API_PORT}", "insecure-skip-tls-verify": True}
        kubeconfig = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": self._token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        self._kubeconfig.write_text(yaml.safe_dump(kubeconfig))

    @property
    def _kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    def _request(
        self, method: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> tuple[int, str]:
        """Return status and body of the answer. Raises OSError."""
        if self._connection is None:
            self._connection = _ApiConnection(self.node)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content_type}
        try:
            text = json.dumps(body) if body is not None else None
            self._connection.request(method, path, body=text, headers=headers)
            response = self._connection.getresponse()
            return response.status, response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            self._connection = None
            raise OSError(f"API request failed: {error}") from error

    def _patch(self, url: str, body: object, kind: str) -> None:
        status, text = self._request("PATCH", url, body, f"application/{kind}")
        if status >= 400:
            raise Rejected(f"{url}: {text.strip()}")

    def apply(self, obj: Json) -> None:
        namespace = obj["metadata"].get("namespace")
        if namespace and namespace not in self._namespaces:
            self._namespaces.add(namespace)
            self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        url = _url(obj)
        without_status = {key: value for key, value in obj.items() if key != "status"}
        self._patch(f"{url}?fieldManager=conformance&force=true", without_status, "apply-patch+yaml")
        if obj["kind"] in ("Service", "Node"):
            status = {"status": obj.get("status", {"loadBalancer": None})}
            self._patch(f"{url}/status", status, "merge-patch+json")

    def delete(self, obj: Mapping[str, Any]) -> None:
        status, text = self._request("DELETE", _url(obj), {"gracePeriodSeconds": 0})
        if status >= 400 and status != 404:
            raise DriverError(f"cannot delete {obj['kind']}: {text}")

    def complete_config(self, mode: str, config: Mapping[str, Any] | None) -> Json:
        connection = {"kubeconfig": str(self._kubeconfig)}
        complete = super().complete_config(mode, config)
        return {**complete, "hostnameOverride": NODE, "clientConnection": connection}

    def arguments(self, mode: str, config: Path) -> list[str]:
        return [f"--config={config}", f"--hostname-override={NODE}"]

    def close(self) -> None:
        super().close()
        if self._connection is not None:
            self._connection.close()
        for part in reversed(self._parts):
            part.stop()


def _url(obj: Mapping[str, Any]) -> str:
    prefix, plural = _RESOURCES[obj["kind"]]
    meta = obj["metadata"]
    scope = f"namespaces/{meta['namespace']}/" if obj["kind"] in _NAMESPACED else ""
    return f"{prefix}{scope}{plural}/{meta['name']}"

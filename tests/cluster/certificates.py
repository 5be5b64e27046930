"""The certificates and kubeconfig files of a cluster, as kubeadm would make them."""

import json
from collections.abc import Sequence
from pathlib import Path

from kproxy_conformance.network.namespaces import run

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_DAYS = "30"


class Certificates:
    """A certificate authority in a directory, and what it has signed."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        run("openssl", "req", "-x509", *_KEY, "-days", _DAYS, "-subj", "/CN=kubernetes",
            "-keyout", str(self.path("ca.key")), "-out", str(self.path("ca.crt")))  # fmt: skip
        run("openssl", "genrsa", "-out", str(self.path("sa.key")), "2048")
        run("openssl", "rsa", "-in", str(self.path("sa.key")), "-pubout", "-out", str(self.path("sa.pub")))

    def path(self, name: str) -> Path:
        return self._directory / name

    def issue(self, name: str, user: str, group: str = "", addresses: Sequence[str] = ()) -> None:
        """Sign ``NAME.crt`` for *user* of *group*, valid for a server at *addresses*, IPs or DNS names."""
        subject = f"/O={group}/CN={user}" if group else f"/CN={user}"
        kinds = [f"{'IP' if ':' in name or name[0].isdigit() else 'DNS'}:{name}" for name in addresses]
        extensions = ["keyUsage=digitalSignature", "extendedKeyUsage=clientAuth,serverAuth"]
        if kinds:
            extensions.append(f"subjectAltName={','.join(kinds)}")
        run("openssl", "req", "-x509", *_KEY, "-days", _DAYS, "-subj", subject,
            "-CA", str(self.path("ca.crt")), "-CAkey", str(self.path("ca.key")),
            *(part for extension in extensions for part in ("-addext", extension)),
            "-addext", "basicConstraints=critical,CA:FALSE",
            "-keyout", str(self.path(f"{name}.key")), "-out", str(self.path(f"{name}.crt")))  # fmt: skip

    def kubeconfig(self, name: str, server: str) -> Path:
        """Write and return ``NAME.conf``, with the certificate NAME."""
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "cluster",
            "clusters": [{"name": "cluster", "cluster": {
                "server": server, "certificate-authority": str(self.path("ca.crt"))}}],
            "users": [{"name": name, "user": {
                "client-certificate": str(self.path(f"{name}.crt")),
                "client-key": str(self.path(f"{name}.key"))}}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": name}}],
        }  # fmt: skip
        path = self.path(f"{name}.conf")
        path.write_text(json.dumps(config))
        return path

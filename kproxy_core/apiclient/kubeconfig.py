"""What a kubeconfig file says of one cluster and one user (client-go 1.36, tools/clientcmd/api/v1).

Read here, and not by the kubernetes package, which imports the model of the whole API to do it: 27 MB
that every node would pay for. Its part is to run credential plugins, where there are any.
"""

import base64
import binascii
import os
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from kproxy_core.objects.yaml_documents import NotYaml, documents

MAX_BYTES = 4 << 20
"""Of a kubeconfig; those with many clusters have some 100 kB."""


class NotUsable(ValueError):
    """The file does not say how to reach a cluster; one line that says why."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", omit_defaults=True):
    """Fields that are null are as absent ones; those that nothing here is about are left out."""


class Cluster(_Section, frozen=True, kw_only=True):
    """Where the API server is, and how to know it."""

    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool | None = None
    tls_server_name: str | None = None
    proxy_url: str | None = None
    disable_compression: bool | None = None
    extensions: list[Any] | None = None


class User(_Section, frozen=True, kw_only=True):
    """Who we are."""

    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")
    username: str | None = None
    password: str | None = None
    exec: dict[str, Any] | None = None
    auth_provider: dict[str, Any] | None = None
    act_as: str | None = msgspec.field(default=None, name="as")


class _Context(_Section, frozen=True, kw_only=True):
    cluster: str = ""
    user: str = ""


class _NamedCluster(_Section, frozen=True, kw_only=True):
    name: str
    cluster: Cluster | None = None


class _NamedUser(_Section, frozen=True, kw_only=True):
    name: str
    user: User | None = None


class _NamedContext(_Section, frozen=True, kw_only=True):
    name: str
    context: _Context | None = None


class _File(_Section, frozen=True, kw_only=True):
    current_context: str | None = None
    clusters: list[_NamedCluster] | None = None
    contexts: list[_NamedContext] | None = None
    users: list[_NamedUser] | None = None


def read_kubeconfig(path: str) -> tuple[Cluster, User]:
    """The cluster and the user of the current context; paths in them are absolute.

    Raises NotUsable, OSError.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise NotUsable("more than 4 MB are no kubeconfig")
    try:
        document = next(documents(data), None)
        content = msgspec.convert({} if document is None else document, _File)
    except NotYaml as error:
        raise NotUsable(f"not YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise NotUsable(str(error)) from error
    wanted = content.current_context
    if not wanted:
        raise NotUsable("it has no current-context")
    context = {entry.name: entry.context for entry in content.contexts or ()}.get(wanted)
    if context is None:
        raise NotUsable(f"current-context: there is no context {wanted[:100]!a}")
    clusters = {entry.name: entry.cluster for entry in content.clusters or ()}
    users = {entry.name: entry.user for entry in content.users or ()}
    cluster = clusters.get(context.cluster)
    if cluster is None:
        raise NotUsable(f"context {wanted[:100]!a}: there is no cluster {context.cluster[:100]!a}")
    if context.user and context.user not in users:
        raise NotUsable(f"context {wanted[:100]!a}: there is no user {context.user[:100]!a}")
    directory = os.path.dirname(os.path.abspath(path))
    user = users.get(context.user) or User()
    return _absolute(cluster, directory, "certificate_authority"), _absolute(
        user, directory, "client_certificate", "client_key", "token_file")


def _absolute(section: Any, directory: str, *fields: str) -> Any:
    """*section* with the paths in *fields* starting at the kubeconfig's own *directory*."""
    return msgspec.structs.replace(section, **{
        field: os.path.join(directory, path) for field in fields if (path := getattr(section, field))})


def decoded(field: str, data: str) -> bytes:
    """What a ``...-data`` *field* holds. Raises NotUsable."""
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise NotUsable(f"{field} is not base64") from error


class Plugged(NamedTuple):
    """Credentials that a plugin gave."""

    token: str
    certificate: bytes
    key: bytes
    expires: float | None
    """Seconds since the epoch."""


def run_plugin(plugin: dict[str, Any], cluster: Cluster, directory: str) -> Plugged:
    """Run the credential plugin that a user's ``exec`` describes (KEP-541). Raises NotUsable."""
    # 0.15 s and 27 MB.
    from kubernetes.config.exec_provider import ExecProvider
    from kubernetes.config.kube_config import ConfigNode

    try:
        status = ExecProvider(ConfigNode("exec", plugin), directory,
                              ConfigNode("cluster", msgspec.to_builtins(cluster))).run()
        expiry = status.get("expirationTimestamp")
        made = Plugged(status.get("token") or "", (status.get("clientCertificateData") or "").encode(),
                       (status.get("clientKeyData") or "").encode(),
                       datetime.fromisoformat(expiry).timestamp() if expiry else None)
    except Exception as error:  # a plugin, and its description, may be wrong in any way
        problem = " ".join(str(error).split())[:300] or type(error).__name__
        raise NotUsable(problem if problem.startswith("exec: ") else f"exec: {problem}") from error
    if not made.token and not (made.certificate and made.key):
        raise NotUsable("exec: the plugin gave neither a token nor a certificate with its key")
    return made

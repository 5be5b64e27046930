"""The child process of `access.Load`: the only module that imports the kubernetes package.

Its arguments are a URL, a kubeconfig (both may be "") and the directory of the service account. It prints a
`Loaded` as JSON.

The whole package costs 30 MiB and 0.15 s, of which a configuration without an auth-provider needs 5 MiB and
0.02 s. So functions import it, once `_import_less` has run.
"""

import logging
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from ipaddress import ip_address
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import yaml

from kproxy_core.kube.access import LOAD_SECONDS, Loaded, NotLoaded, names_a_proxy, stamp

_MAX_BYTES = 4 << 20
"""Limit in bytes for a kubeconfig."""

_MOST_MEMORY = 512 << 20
"""Limit in bytes for the memory of this process, which holds the plugin's whole output, and of the plugin."""

_IN_MEMORY = "/dev/shm"
"""Directory in which the kubernetes package writes inlined keys to files while it loads."""

_NEED_ALL = (b"auth-provider", b"username")
"""Fields of a kubeconfig for which the kubernetes package uses its API client, oauthlib or urllib3."""

_PACKAGES = ("kubernetes", "kubernetes.client", "kubernetes.config")
"""Packages that import all of their modules."""

_REPLACED = {
    "kubernetes.client": ("ApiClient", "Configuration"), "requests_oauthlib": ("OAuth2Session",),
    "oauthlib": (), "oauthlib.oauth2": (), "urllib3": (),
}
"""Modules that the loaders import without using them, and the names imported from these."""


def main(arguments: list[str]) -> None:
    """Load what *arguments* name, the API server, a kubeconfig and a service account, and print it."""
    master, kubeconfig, service_account = arguments
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGALRM, _end)
    signal.alarm(LOAD_SECONDS + 10)  # for the case that the proxy was killed
    try:
        if not _needs_all(kubeconfig) and not names_a_proxy():
            _import_less()
        loaded = _load(master, kubeconfig, service_account)
    except NotLoaded as error:
        loaded = Loaded(problem=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(loaded))


def _end(number: int, _: object) -> None:
    if number == signal.SIGALRM:  # The proxy, which ends the plugin by SIGTERM as well, is gone.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    sys.exit(128 + number)  # and clean up on the way


def _needs_all(kubeconfig: str) -> bool:
    try:
        with open(kubeconfig or os.devnull, "rb") as file:
            data = file.read(_MAX_BYTES)
    except OSError:
        return False  # reported by `_from_kubeconfig`
    return any(field in data for field in _NEED_ALL)


def _import_less() -> None:
    """Keep the loaders from importing modules that they will not use."""
    for name in _PACKAGES:
        spec = find_spec(name)
        if spec is not None:
            sys.modules[name] = module_from_spec(spec)  # whose submodules can be imported
    for name, imported in _REPLACED.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        for attribute in imported:
            setattr(module, attribute, None)


def _load(master: str, kubeconfig: str, service_account: str) -> Loaded:
    from kubernetes.config.config_exception import ConfigException

    try:
        if kubeconfig:
            return _from_kubeconfig(kubeconfig, master)
        if master:
            return Loaded(server=master, proxy=proxy_of_environment(master))
        return _in_cluster(service_account)
    except FileNotFoundError as error:
        raise NotLoaded(f"there is no file {error.filename!r}") from error
    except yaml.YAMLError as error:
        raise NotLoaded(f"not YAML: {_one_line(error)}") from error
    except (ConfigException, OSError) as error:
        raise NotLoaded(_one_line(error)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # The package takes the shape of a file for granted.
        raise NotLoaded(f"malformed: {type(error).__name__}: {_one_line(error)}") from error


def _from_kubeconfig(path: str, master: str) -> Loaded:
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    files = [(path, stamp(path))]
    if os.stat(path).st_size > _MAX_BYTES:
        raise NotLoaded(f"larger than {_MAX_BYTES >> 20} MiB")
    merger = KubeConfigMerger(path)
    in_memory = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=in_memory) as inlined:
        loader = KubeConfigLoader(
            merger.config, temp_file_path=inlined, config_base_path=None,
            # Renewed OpenID Connect tokens are written back, as by kubectl; but not the server of --master.
            config_persister=None if master else merger.save_changes)
        cluster, user = _active(merger.config, loader)
        if master:
            cluster["server"] = master
        if user.get("tokenFile"):
            token_file = os.path.join(os.path.dirname(os.path.abspath(path)), user["tokenFile"])
            files.append((token_file, stamp(token_file)))
        config = _configuration(cluster.get("server"))
        complaints = _Complaints()
        with _bounded_memory():
            loader.load_and_set(config)
        _check_credentials(user, loader, complaints.texts)
        pems = []
        for name in (config.ssl_ca_cert, config.cert_file, config.key_file):
            if name and os.path.dirname(name) != inlined:
                files.append((name, stamp(name)))
            pems.append(_read(name))
        expiry = getattr(loader, "expiry", None)
        ca, certificate, key = pems
        return Loaded(
            server=cluster.get("server") or "", ca=ca, certificate=certificate or "", key=key or "",
            verify=config.verify_ssl, server_name=config.tls_server_name or "",
            headers=[*_authorization(getattr(loader, "token", "")), *_impersonation(user)],
            proxy=cluster.get("proxy-url") or proxy_of_environment(config.host),
            compression=not cluster.get("disable-compression"), files=files,
            expires=expiry.timestamp() if expiry else None,
            generated=bool(user.get("exec") or user.get("auth-provider")))


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Bound the plugin's output that this process holds, and the plugin's own memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > _MOST_MEMORY:
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _configuration(host: str | None) -> Any:
    """Return the attributes of `kubernetes.client.Configuration` that the loaders set or leave."""
    return SimpleNamespace(host=host, ssl_ca_cert=None, cert_file=None, key_file=None, verify_ssl=True,
                           tls_server_name=None, api_key={})


def _active(config: Any, loader: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the cluster and the user of the current context."""
    context = loader.current_context["context"]
    cluster = config["clusters"].get_with_name(context["cluster"])["cluster"].value
    named = config["users"].get_with_name(context["user"], safe=True) if context.get("user") else None
    if context.get("user") and named is None:
        raise NotLoaded(f"there is no user {context['user'][:100]!a}")
    return cluster, (named.value.get("user") if named else None) or {}


def _check_credentials(user: dict[str, Any], loader: Any, complaints: list[str]) -> None:
    """Raise NotLoaded if a plugin or provider failed, which the package only logs."""
    if complaints:
        text = complaints[0] or f"it failed, perhaps because it printed more than {_MOST_MEMORY >> 20} MiB"
        raise NotLoaded(text if text.startswith("exec: ") or "exec" not in user else f"exec: {text}")
    provider = user.get("auth-provider")
    if provider and not getattr(loader, "token", None):
        raise NotLoaded(f"auth-provider {provider.get('name')!a}: it returned no token")
    if user.get("tokenFile") and not getattr(loader, "token", None):
        raise NotLoaded(f"{user['tokenFile']} contains no token")


def _in_cluster(directory: str) -> Loaded:
    """Load the pod's own configuration: kubernetes.io, "Accessing the Kubernetes API from a Pod"."""
    from kubernetes.config.incluster_config import InClusterConfigLoader

    token, ca = (os.path.join(directory, name) for name in ("token", "ca.crt"))
    files = [(path, stamp(path)) for path in (token, ca)]
    config = _configuration(None)
    loader = InClusterConfigLoader(token, ca)
    loader.load_and_set(config)
    return Loaded(server=config.host, ca=_read(ca), headers=list(_authorization(loader.token)), files=files,
                  proxy=proxy_of_environment(config.host))


def _read(path: str | None) -> str | None:
    if not path:
        return None
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()


def _authorization(credentials: str) -> Iterator[tuple[str, str]]:
    if credentials.strip():
        yield _header("Authorization", credentials.strip(), "the user's token")


def _impersonation(user: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the headers for acting as another user, as client-go's transport.ImpersonationConfig."""
    if user.get("as"):
        yield _header("Impersonate-User", user["as"], "as")
    elif any(user.get(key) for key in ("as-uid", "as-groups", "as-user-extra")):
        raise NotLoaded("as-uid, as-groups and as-user-extra need as")
    if user.get("as-uid"):
        yield _header("Impersonate-Uid", user["as-uid"], "as-uid")
    for group in user.get("as-groups") or ():
        yield _header("Impersonate-Group", group, "as-groups")
    for key, values in (user.get("as-user-extra") or {}).items():
        for value in values:
            yield _header(f"Impersonate-Extra-{quote(key.lower(), safe='')}", value, "as-user-extra")


def _header(name: str, value: object, field: str) -> tuple[str, str]:
    if not isinstance(value, str) or not value.isascii() or not value.isprintable():
        raise NotLoaded(f"{field}: contains characters that a header cannot have")
    return name, value


def proxy_of_environment(server: str) -> str:
    """Return the proxy that the environment names for *server*; "" if none.

    As for client-go, a loopback address is never reached through one.
    """
    if not names_a_proxy():
        return ""
    from kubernetes.client import Configuration
    from kubernetes.client.rest import should_bypass_proxies

    if "://" not in server:
        server = f"http://{server}"
    config = Configuration(host=server)
    host = urlsplit(server).hostname or ""
    try:
        is_loopback = ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    exceptions = (config.no_proxy or "").replace("*.", ".")
    return "" if is_loopback or should_bypass_proxies(server, exceptions) else config.proxy or ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class _Complaints(logging.Handler):
    """Collects messages that the kubernetes package logs instead of raising, from now on."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(" ".join(record.getMessage().split())[:300])

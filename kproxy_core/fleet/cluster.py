"""The nodes of a cluster and their kproxy pods, and commands that run in these (``pods/exec``)."""

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlencode

import msgspec
import urllib3
import websocket
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from kubernetes.stream import ws_client
from msgspec import Struct, field

from kproxy_core.fleet.errors import BadKubeconfig, Forbidden, NoCluster, Unreached
from kproxy_core.observe.logs import printable

NAMESPACE = "kube-system"
SELECTOR = "k8s-app=kproxy"
"""The DaemonSet of ``deploy/``: its namespace, and the labels of its pods."""
CONTAINER = "kproxy"
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
AT_A_TIME = 50
"""Nodes that are asked at the same time."""
TIMEOUT = 30.0
"""Seconds for a request to the API server, or for a command in a pod."""
LONGEST = 16 << 20
"""Bytes of output, after which a command is given up."""

_STDOUT, _STDERR, _RESULT = 1, 2, 3
"""Channels of ``v4.channel.k8s.io`` (k8s.io/apimachinery, pkg/util/remotecommand)."""
_DENIED = re.compile(
    r'cannot (?P<verb>\S+) resource "(?P<resource>[^"]+)" in API group "[^"]*"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?')
"""The API server's words for a request that RBAC refuses."""

_T = TypeVar("_T")


class Node(Struct, frozen=True, kw_only=True):
    """A Node object, and the kproxy that serves it."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ready: bool
    """The condition Ready, by its kubelet."""
    pod: str = ""
    """Name of the kproxy pod; "": none runs here."""
    namespace: str = ""
    container: str = ""
    problem: str = ""
    """Why there is no pod."""


class Reply(Struct, frozen=True):
    """The result of a command on a node."""

    status: int
    """Exit status."""
    stdout: bytes
    stderr: str
    """Printable lines."""


class Cluster:
    """A cluster as its user sees it. All methods raise NoCluster and Forbidden."""

    def __init__(
        self, kubeconfig: str = "", context: str = "", namespace: str = "", selector: str = "",
    ) -> None:
        """*kubeconfig*, *context*: as kubectl's; without a kubeconfig in a pod, its service account.

        *namespace*, *selector*: of the kproxy pods; "": those of ``deploy/``.
        """
        self.namespace = namespace or NAMESPACE
        self.selector = selector or SELECTOR
        self.default_namespace = "default"
        """For objects that are named without one: that of the context, or of this pod."""
        self._ahead = 0.0
        """Seconds by which the API server's clock is ahead of this machine's."""
        self._configuration = client.Configuration()
        self._load(kubeconfig, context)
        self._configuration.retries = False
        self._api = client.ApiClient(self._configuration)
        websocket.setdefaulttimeout(TIMEOUT)
        self._open: set[socket.socket] = set()
        """Connections under way, which `close` ends."""

    def _load(self, kubeconfig: str, context: str) -> None:
        logging.getLogger().addHandler(logging.NullHandler())  # The package logs there what it raises.
        in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
        is_named = kubeconfig or context or os.environ.get("KUBECONFIG")
        try:
            if in_pod and not is_named and not Path("~/.kube/config").expanduser().exists():
                config.load_incluster_config(client_configuration=self._configuration)
                self.default_namespace = _OWN_NAMESPACE.read_text(encoding="utf-8").strip()
            else:
                config.load_kube_config(
                    kubeconfig or None, context or None, client_configuration=self._configuration)
                contexts, current = config.list_kube_config_contexts(kubeconfig or None)
                named = [each for each in contexts if each["name"] == context] or [current]
                self.default_namespace = named[0]["context"].get("namespace") or self.default_namespace
        except (ConfigException, OSError) as error:
            raise BadKubeconfig(f"the kubeconfig cannot be used: {_one_line(error)}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # The package takes the shape of a file for granted.
            raise BadKubeconfig(f"the kubeconfig is malformed: {_one_line(error)}") from error

    def close(self) -> None:
        """Give up all commands under way. They may go on in the pods."""
        for sock in list(self._open):
            _shut_down(sock)

    def now(self) -> float:
        """Return the time by the clock of the API server, in seconds since the epoch."""
        return time.time() + self._ahead

    # Objects

    def nodes(self, selector: str = "") -> list[Node]:
        """Return the nodes with labels that match *selector*, by name, each with its kproxy pod."""
        objects = self.objects("/api/v1/nodes", _NodeObject, label_selector=selector)
        pods: dict[str, list[_Pod]] = {}
        for pod in self.objects(
                f"/api/v1/namespaces/{self.namespace}/pods", _Pod, label_selector=self.selector):
            pods.setdefault(pod.spec.node_name, []).append(pod)
        return sorted((self._node(obj, pods.get(obj.metadata.name, ())) for obj in objects),
                      key=lambda node: node.name)

    def _node(self, obj: "_NodeObject", pods: Sequence["_Pod"]) -> Node:
        name = obj.metadata.name
        ready = any(condition.type == "Ready" and condition.status == "True"
                    for condition in obj.status.conditions)
        about = Node(name=name, labels=obj.metadata.labels or {}, ready=ready)
        if not pods:
            return msgspec.structs.replace(
                about, problem=f"no pod with {self.selector} in namespace {self.namespace} runs here")
        # While a DaemonSet is updated, the next pod stands by until the old one has ended.
        pod = min(pods, key=lambda pod: (not pod.is_running, pod.metadata.creation_timestamp or ""))
        if not pod.is_running:
            return msgspec.structs.replace(about, problem=f"pod {pod.metadata.name}: {pod.reason}")
        return msgspec.structs.replace(
            about, pod=pod.metadata.name, namespace=pod.metadata.namespace or self.namespace,
            container=pod.container)

    def objects(self, path: str, kind: type[_T], *, label_selector: str = "", field_selector: str = ""
                ) -> list[_T]:
        """Return the objects below *path*, such as ``/api/v1/nodes``, as structs of *kind*."""
        query = {name: text for name, text in (
            ("labelSelector", label_selector), ("fieldSelector", field_selector)) if text}
        data = self._get(path, query)
        try:
            return msgspec.json.decode(data, type=_List[kind]).items  # type: ignore[valid-type]
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise NoCluster(f"GET {path}: the answer is no list of objects: {error}") from error

    def _get(self, path: str, query: Mapping[str, str]) -> bytes:
        url = f"{self._configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json", **self._authorization()}
        try:
            answer = self._api.call_api("GET", url, headers, _request_timeout=TIMEOUT)
            data: bytes = answer.read()
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            raise NoCluster(f"the API server at {self._configuration.host} does not answer: "
                            f"{_one_line(error)}") from error
        if answer.status != 200:
            *_, scope, namespace, resource = path.split("/")
            raise self._refusal(answer.status, data, "list", resource,
                                namespace if scope == "namespaces" else "")
        with suppress(TypeError, ValueError):
            self._ahead = parsedate_to_datetime(answer.getheader("Date")).timestamp() - time.time()
        return data

    def _refusal(
        self, status: int, body: bytes, verb: str, resource: str, namespace: str
    ) -> NoCluster | Forbidden:
        message = _message(body)
        if found := _DENIED.search(message) if status == 403 else None:
            return Forbidden(found["verb"], found["resource"], found["namespace"] or "")
        if status == 403 and not message:
            return Forbidden(verb, resource, namespace)
        if status == 401:
            return NoCluster("the API server does not accept the kubeconfig's credentials (401)")
        return NoCluster(f"the API server answers {status} to {verb} {resource}: {message or 'no reason'}")

    def _authorization(self) -> dict[str, str]:
        return {auth["key"]: auth["value"] for auth in self._configuration.auth_settings().values()
                if auth["in"] == "header" and auth["value"]}

    # Commands

    def ask(
        self, node: Node, command: Sequence[str], timeout: float = TIMEOUT,
        on_line: Callable[[str], None] | None = None, longest: int = LONGEST,
    ) -> Reply:
        """Run *command* in the kproxy container of *node* for up to *timeout* seconds. Raises Unreached.

        Its output may have *longest* bytes.
        *on_line* is called with each line of standard output, printable, as soon as it is whole.
        """
        if not node.pod:
            raise Unreached(node.name, node.problem)
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _shut_down(sock)

        with self._connected(node, command) as (connection, sock):
            # Unlike a limit for each read, it also ends the reads of a peer that sends a byte now and then.
            timer = threading.Timer(timeout, expire)
            timer.daemon = True
            timer.start()
            try:
                return _read(node, connection, on_line, longest)
            except Unreached:
                if expired.is_set():
                    raise Unreached(node.name, f"no answer within {timeout:g} s") from None
                raise
            finally:
                timer.cancel()

    def ask_all(
        self, nodes: Sequence[Node], command: Sequence[str], at_a_time: int = AT_A_TIME,
        timeout: float = TIMEOUT, progress: Callable[[int, int], None] | None = None, longest: int = LONGEST,
    ) -> Iterator[tuple[Node, Reply | Unreached]]:
        """Ask *nodes*, *at_a_time* of them at once, and yield each with its answer, the first one first.

        *progress* is called with the numbers of nodes that have been asked and of all.
        """
        executor = ThreadPoolExecutor(at_a_time, thread_name_prefix="kproxy-fleet")
        try:
            futures = {executor.submit(self._try, node, command, timeout, longest): node for node in nodes}
            for number, future in enumerate(as_completed(futures), 1):
                if progress is not None:
                    progress(number, len(nodes))
                yield futures.pop(future), future.result()  # A result may be large, and is not kept.
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            self.close()
            raise
        finally:
            executor.shutdown()

    def _try(
        self, node: Node, command: Sequence[str], timeout: float, longest: int
    ) -> Reply | Unreached:
        try:
            return self.ask(node, command, timeout, longest=longest)
        except Unreached as error:
            return error

    @contextmanager
    def _connected(
        self, node: Node, command: Sequence[str]
    ) -> Iterator[tuple["websocket.WebSocket", socket.socket]]:
        """Yield the connection to a command that has started, and its socket. Raises Unreached."""
        path = f"/api/v1/namespaces/{node.namespace}/pods/{node.pod}/exec"
        query = [*(("command", word) for word in command), ("container", node.container),
                 ("stdout", "true"), ("stderr", "true")]
        url = ws_client.get_websocket_url(f"{self._configuration.host}{path}", query)
        headers = self._authorization() | {"sec-websocket-protocol": "v4.channel.k8s.io"}
        try:
            connection = ws_client.create_websocket(self._configuration, url, headers)
        except websocket.WebSocketBadStatusException as error:
            refusal = self._refusal(
                error.status_code, error.resp_body or b"", "create", "pods/exec", node.namespace)
            if isinstance(refusal, Forbidden):
                raise refusal from error
            raise Unreached(node.name, str(refusal)) from error
        except (websocket.WebSocketException, OSError, ValueError) as error:
            raise Unreached(node.name, f"no connection by the API server: {_one_line(error)}") from error
        connection.settimeout(None)
        sock = connection.sock
        assert sock is not None
        self._open.add(sock)
        try:
            yield connection, sock
        finally:
            self._open.discard(sock)
            connection.shutdown()


def _shut_down(sock: socket.socket) -> None:
    """End the connection of *sock*, from which another thread may be reading, by TLS or without."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _read(
    node: Node, connection: "websocket.WebSocket", on_line: Callable[[str], None] | None, longest: int
) -> Reply:
    """Return the reply of a command that has started. Raises Unreached."""
    outputs = {_STDOUT: bytearray(), _STDERR: bytearray(), _RESULT: bytearray()}
    shown = 0
    try:
        while True:
            opcode, data = connection.recv_data()
            if opcode == websocket.ABNF.OPCODE_CLOSE:
                break
            if not data or data[0] not in outputs:
                continue
            outputs[data[0]] += data[1:]
            if sum(map(len, outputs.values())) > longest:
                raise Unreached(node.name, f"printed more than {longest >> 20} MiB")
            while on_line is not None and (end := outputs[_STDOUT].find(b"\n", shown)) >= 0:
                on_line(printable(outputs[_STDOUT][shown:end].decode(errors="replace")))
                shown = end + 1
    except (websocket.WebSocketException, OSError, ValueError) as error:
        if not outputs[_RESULT]:
            raise Unreached(node.name, f"the connection broke: {_one_line(error)}") from error
    return Reply(_status(node, bytes(outputs[_RESULT])), bytes(outputs[_STDOUT]),
                 "\n".join(printable(line) for line in
                           outputs[_STDERR].decode(errors="replace").splitlines()))


def _status(node: Node, data: bytes) -> int:
    """Return the exit status in *data* of the result's channel. Raises Unreached: nothing ran."""
    try:
        result = msgspec.json.decode(data, type=_Result)
        if result.status == "Success":
            return 0
        for cause in result.details.causes if result.details else ():
            if cause.reason == "ExitCode":
                return int(cause.message)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unreached(node.name, "the connection ended before the command") from error
    raise Unreached(node.name, printable(result.message) or "the command could not be run")


def _message(body: bytes | str) -> str:
    """Return the message of a Status object, printable; "" if *body* is none."""
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return printable(msgspec.json.decode(body, type=_Result).message)
    return ""


def _one_line(error: BaseException) -> str:
    return printable(" ".join(str(error).split()))[:300] or type(error).__name__


# The parts of Kubernetes objects that are read. Null means absent, as for the API server.


class _Object(Struct, frozen=True, rename="camel"):
    pass


class _Metadata(_Object, frozen=True):
    name: str
    namespace: str | None = None
    labels: dict[str, str] | None = None
    creation_timestamp: str | None = None


class _Condition(_Object, frozen=True):
    type: str
    status: str


class _NodeStatus(_Object, frozen=True):
    conditions: list[_Condition] = field(default_factory=list)


class _NodeObject(_Object, frozen=True):
    metadata: _Metadata
    status: _NodeStatus = field(default_factory=_NodeStatus)


class _State(_Object, frozen=True):
    reason: str = ""
    message: str = ""


class _ContainerStatus(_Object, frozen=True):
    name: str
    state: dict[str, _State | None] = field(default_factory=dict)


class _Container(_Object, frozen=True):
    name: str


class _PodSpec(_Object, frozen=True):
    node_name: str = ""
    containers: list[_Container] = field(default_factory=list)


class _PodStatus(_Object, frozen=True):
    phase: str = ""
    reason: str = ""
    container_statuses: list[_ContainerStatus] = field(default_factory=list)


class _Pod(_Object, frozen=True):
    metadata: _Metadata
    spec: _PodSpec = field(default_factory=_PodSpec)
    status: _PodStatus = field(default_factory=_PodStatus)

    @property
    def container(self) -> str:
        names = [container.name for container in self.spec.containers]
        return CONTAINER if CONTAINER in names or not names else names[0]

    @property
    def _container_status(self) -> _ContainerStatus | None:
        return next((one for one in self.status.container_statuses if one.name == self.container), None)

    @property
    def is_running(self) -> bool:
        status = self._container_status
        return status is not None and status.state.get("running") is not None

    @property
    def reason(self) -> str:
        """Return why its container does not run."""
        status = self._container_status
        for state in (status.state.values() if status is not None else ()):
            if state is not None and state.reason:
                return printable(": ".join(filter(None, (state.reason, state.message))))
        return printable(self.status.reason or self.status.phase or "not started")


class _List(Struct, Generic[_T], frozen=True):
    items: list[_T]


class _Cause(_Object, frozen=True):
    reason: str = ""
    message: str = ""


class _Details(_Object, frozen=True):
    causes: list[_Cause] = field(default_factory=list)


class _Result(_Object, frozen=True):
    """``metav1.Status``."""

    status: str = ""
    message: str = ""
    details: _Details | None = None

"""API servers for tests: the bench's real one, and one that follows a script."""

import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kproxy_conformance.apiserver import protobuf
from tests.core.namespaces import Namespace
from tests.patience import PATIENCE

CHECKOUT = Path(__file__).resolve().parents[2]
TLS = Path(__file__).parent / "tls"

Json = dict[str, Any]


class BenchServer:
    """`kproxy_conformance.apiserver` as a process; `stop` and `start` again keep the address."""

    def __init__(self, *options: str, node: Namespace | None = None, port: int = 0) -> None:
        """*node*: the namespace that it runs in, if another than this one. *port* 0: any."""
        self._node = node
        self.port = port
        self._process: subprocess.Popen[str] | None = None
        self._control: HTTPConnection | None = None
        self._control_lock = threading.Lock()
        self.start(*options)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *options: str) -> None:
        """Start it, and return when it listens."""
        program = ["-m", "kproxy_conformance.apiserver"]
        there = ["ip", "netns", "exec", self._node.name] if self._node else []
        self._process = subprocess.Popen(
            [*there, sys.executable, *program, "--port", str(self.port), *options],
            stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().rsplit(":", 1)[1])

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        with self._control_lock:
            self._hang_up()

    def freeze(self) -> None:
        """Stop the process, while the kernel keeps its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def post(self, action: str, **body: object) -> None:
        """Call a control endpoint, e.g. ``apply`` or ``delete``, over one connection for all calls.

        Raises OSError.
        """
        self._call("POST", action, json.dumps(body))

    def events(self) -> list[Json]:
        """Return the events that clients have reported. Raises OSError."""
        found: list[Json] = json.loads(self._call("GET", "events"))["events"]
        return found

    def _call(self, method: str, action: str, body: str | None = None) -> bytes:
        with self._control_lock:
            try:
                if self._control is None or self._control.sock is None:
                    self._control = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
                    if self._node is not None:
                        self._node.inside(self._control.connect)
                self._control.request(method, f"/bench/{action}", body)
                response = self._control.getresponse()
                answer = response.read()
            except BaseException:
                self._hang_up()
                raise
        assert response.status == 200, answer
        return answer

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


@dataclass(frozen=True)
class Request:
    """One request of a client."""

    resource: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    connection: int
    """Number of its connection."""


KINDS = {"services": "Service", "endpointslices": "EndpointSlice", "nodes": "Node",
         "servicecidrs": "ServiceCIDR"}
INVALID_MESSAGE = b"\x12\x03\x1a\x01\xff"
"""A spec that is not UTF-8, for objects with fields of a wrong type: protobuf can't express those."""


@dataclass
class Exchange:
    """One request at a `ScriptedServer`, to be answered by a test's step."""

    request: Request
    socket: socket.socket
    is_protobuf: bool
    left: bool = False

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self, status: int, body: Json | bytes, *headers: str) -> None:
        """A whole response."""
        data = self._encoded(body)
        head = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(data)}", *headers]
        if self.is_protobuf:
            head.append(f"Content-Type: {protobuf.CONTENT_TYPE}")
        self.send("\r\n".join([*head, "", ""]).encode("latin-1") + data)

    def _encoded(self, body: Json | bytes) -> bytes:
        if isinstance(body, bytes):
            return body
        if not self.is_protobuf:
            return json.dumps(body).encode()
        if "items" in body:
            return protobuf.encode_list(self._kind, body["metadata"], list(map(self._item, body["items"])))
        return protobuf.encode_object("Status", body)

    def event(self, content: Json | bytes) -> bytes:
        """An event of a watch, or the *content* of one that is none, as the watch has it."""
        if not self.is_protobuf:
            return (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n"
        if isinstance(content, bytes):
            return protobuf.frame(content)
        if content["type"] == "ERROR":
            obj = protobuf.encode_object("Status", content["object"])
        else:
            item = self._item(content["object"])
            obj = protobuf.envelope(self._kind, protobuf.api_version(self._kind), item)
        return protobuf.encode_event(content["type"], obj)

    def events(self, contents: Sequence[Json | bytes]) -> bytes:
        return b"".join(map(self.event, contents))

    @property
    def _kind(self) -> str:
        return KINDS[self.request.resource]

    def _item(self, obj: Json) -> bytes:
        try:
            return protobuf.encode_item(self._kind, obj)
        except (AttributeError, TypeError, ValueError):
            return protobuf.encode_item(self._kind, {"metadata": obj["metadata"]}) + INVALID_MESSAGE

    def begin_watch(self) -> None:
        kind = f"{protobuf.CONTENT_TYPE};stream=watch" if self.is_protobuf else "application/json"
        self.send(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())

    def end_watch(self) -> None:
        self.send(b"0\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def leave(self) -> None:
        """Close the connection, whether or not the response was whole."""
        self.left = True
        _shut_down(self.socket)

    def until_closed(self) -> None:
        """Wait for the client to close the connection."""
        while self.socket.recv(4096):
            pass


Step = Callable[[Exchange], None]


def refuse(status: int, *headers: str, reason: str = "Refused", details: Json | None = None) -> Step:
    """Answer with an error."""
    body = {"kind": "Status", "status": "Failure", "code": status, "reason": reason, "message": reason,
            "details": details}
    return lambda exchange: exchange.answer(status, body, *headers)


def listed(*items: Json, version: int, rest: str = "") -> Step:
    """Answer a LIST; *rest*: the token of the next page."""
    meta = {"resourceVersion": str(version)} | ({"continue": rest} if rest else {})
    return lambda exchange: exchange.answer(200, {"metadata": meta, "items": items})


def watched(*lines: Json | bytes, hold: bool = True) -> Step:
    """Answer a WATCH with *lines*; *hold*: then wait for the client, else cut the connection."""
    def step(exchange: Exchange) -> None:
        exchange.begin_watch()
        if lines:
            exchange.chunk(exchange.events(lines))
        if hold:
            exchange.until_closed()
        exchange.leave()
    return step


def idle(exchange: Exchange) -> None:
    """A server without objects: lists, watches and watch-lists are empty."""
    query = exchange.request.query
    if "watch" not in query:
        listed(version=1)(exchange)
    elif "sendInitialEvents" in query:
        watched(initial_events_end(1))(exchange)
    else:
        watched()(exchange)


def event(kind: str, obj: Json, version: int) -> Json:
    """ADDED, MODIFIED or DELETED."""
    return {"type": kind, "object": obj | {"metadata": obj["metadata"] | {"resourceVersion": str(version)}}}


def bookmark(version: int) -> Json:
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}


def initial_events_end(version: int) -> Json:
    """The bookmark that ends the initial events of a watch-list."""
    meta = {"resourceVersion": str(version), "annotations": {"k8s.io/initial-events-end": "true"}}
    return {"type": "BOOKMARK", "object": {"metadata": meta}}


def service(name: str, ip: str = "10.96.0.1") -> Json:
    return {"metadata": {"namespace": "default", "name": name},
            "spec": {"type": "ClusterIP", "clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"],
                     "ports": [{"port": 80, "protocol": "TCP"}]}}


@dataclass
class ScriptedServer:
    """Answers the requests for each resource with the given steps, one after the other, and is idle then."""

    scripts: Mapping[str, Sequence[Step]]
    tls: ssl.SSLContext | None = None
    port: int = 0
    address: str = "127.0.0.1"
    speaks_protobuf: bool = False
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._remaining = {resource: list(steps) for resource, steps in self.scripts.items()}
        self._listener = socket.create_server((self.address, self.port))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}:{self.port}"

    def asked(self, resource: str) -> list[Mapping[str, str]]:
        """The queries of all requests for *resource*."""
        return [request.query for request in self.requests if request.resource == resource]

    def client_ports(self) -> list[int]:
        """The client's port of each connection."""
        with self._lock:
            return [connection.getpeername()[1] for connection in self._sockets]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        with self._lock:
            for connection in self._sockets:
                _shut_down(connection)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        for number in range(1 << 30):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection, number))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        # Errors here are caused by the client, or by the end of the test.
        with connection:
            with suppress(OSError):
                if self.tls is None:
                    self._answer_all(connection, number)
                    return
                with self.tls.wrap_socket(connection, server_side=True) as secure:
                    with self._lock:
                        self._sockets.append(secure)
                    self._answer_all(secure, number)

    def _answer_all(self, connection: socket.socket, number: int) -> None:
        while True:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                data = connection.recv(65536)
                if not data:
                    return
                head += data
            request = _parse(head.decode(), number)
            with self._lock:
                self.requests.append(request)
                steps = self._remaining.get(request.resource)
                step = steps.pop(0) if steps else idle
            asked = request.headers.get("accept", "").startswith(protobuf.CONTENT_TYPE)
            exchange = Exchange(request, connection, self.speaks_protobuf and asked)
            step(exchange)
            if exchange.left:
                return


def server_tls(verify: ssl.VerifyMode = ssl.CERT_OPTIONAL, *clients: Path) -> ssl.SSLContext:
    """TLS of a server that trusts our test CA, and the certificates of *clients*."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.crt", TLS / "server.key")
    for trusted in (TLS / "ca.crt", *clients):
        context.load_verify_locations(trusted)
    context.verify_mode = verify
    return context


def replace_file(path: Path, text: str) -> None:
    """Replace the content of the file at *path* in one step, so that no reader finds half of it."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.rename(path)


def write_kubeconfig(path: Path, server: str, cluster: Json | None = None, user: Json | None = None) -> str:
    """Write a kubeconfig for *server* to *path*, and return *path*."""
    replace_file(path, json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server} | (cluster or {})}],
        "users": [{"name": "u", "user": user or {}}]}))
    return str(path)


def _parse(head: str, connection: int) -> Request:
    first, *lines = head.strip().split("\r\n")
    target = urlsplit(first.split()[1])
    headers = {name.lower(): value.strip() for name, _, value in (text.partition(":") for text in lines)}
    return Request(target.path.rsplit("/", 1)[1], dict(parse_qsl(target.query)), headers, connection)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)

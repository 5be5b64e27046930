"""Events for the cluster's operators: events.k8s.io/v1, written to the API server."""

import json
import time

from kproxy_core.apiclient.access import AccessError, load_access
from kproxy_core.apiclient.connection import Connection, Response
from kproxy_core.apiclient.framing import ProtocolError
from kproxy_core.apiclient.requests import ApiRequest, Observe
from kproxy_core.observe.events.api_event import Event, NotWritten

_CONTROLLER = "kube-proxy"
"""Under this name operators look for the events of a node's service proxy."""

_MAX_NOTE, _MAX_NAME = 1024, 253
"""Bytes that the API server takes: longer ones are refused with the whole event."""

_SILENCE = 10.0
"""Seconds that the server may take to answer."""


class EventWriter:
    """Writes events to the API server that *master* and *kubeconfig* name (see `load_access`).

    Credentials and connection are taken anew for each event, and kept for none: events are rare.
    """

    def __init__(self, master: str, kubeconfig: str, host: str, observe: Observe) -> None:
        """*host*: the name of this machine, which the events come from; *observe* is told of each request."""
        self._master = master
        self._kubeconfig = kubeconfig
        self._host = host
        self._observe = observe

    def write(self, event: Event, happened: int) -> None:
        """Deliver *event* of the time *happened*, in nanoseconds since the epoch. Raises NotWritten."""
        namespace = event.regarding.namespace or "default"
        body = json.dumps(_document(event, namespace, happened, self._host)).encode()
        try:
            access = load_access(self._master, self._kubeconfig)
            connection = _Posting(access)
            started, code, received = time.monotonic(), "<error>", None
            try:
                response = connection.post(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", body)
                answer = response.read_all()
                code, received = str(response.status), len(answer)
            finally:
                connection.close()
                self._observe(ApiRequest(
                    access.authority, code, 0.0, time.monotonic() - started, received, "POST", len(body)))
        except (OSError, AccessError, ProtocolError) as error:
            raise NotWritten(str(error), again=True) from error
        if response.status >= 300:
            again = response.status >= 500 or response.status == 429
            raise NotWritten(f"{response.status} {answer[:200].decode(errors='replace')}", again)


def _document(event: Event, namespace: str, happened: int, host: str) -> dict[str, object]:
    regarding = {"kind": event.regarding.kind, "name": event.regarding.name, "uid": event.regarding.uid}
    if event.regarding.namespace:
        regarding["namespace"] = event.regarding.namespace
    seconds, rest = divmod(happened, 1_000_000_000)
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": _name(event.regarding.name, f".{happened:x}"), "namespace": namespace},
        "eventTime": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1000:06d}Z",
        "reportingController": _CONTROLLER,
        "reportingInstance": f"{_CONTROLLER}-{host}",
        "type": event.type,
        "reason": event.reason,
        "action": event.action,
        "regarding": regarding,
        "note": event.note.encode()[:_MAX_NOTE].decode(errors="ignore"),
    }


def _name(regarding: str, suffix: str) -> str:
    """A name for an event; that of the longest node leaves no room for a *suffix*."""
    return regarding[:_MAX_NAME - len(suffix)].rstrip(".-") + suffix


class _Posting(Connection):
    """A connection for one request that brings something."""

    def post(self, target: str, body: bytes) -> Response:
        """Raises OSError, ProtocolError."""
        head, end = self._request(target, False)[:-2], b"\r\n"
        head = b"POST" + head.removeprefix(b"GET")
        about = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n".encode()
        self._connect()
        return self._exchange(head + about + end + body, _SILENCE)

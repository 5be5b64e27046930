"""Events written to the API server (events.k8s.io/v1)."""

import json
import time

from kproxy_core.kube.access import AccessError, CurrentAccess
from kproxy_core.kube.requests import MAX_REFUSAL, ApiRequest, Observe
from kproxy_core.kube.transport import ProtocolError, Transport
from kproxy_core.observe.events import ClusterEvent, NotWritten

_CONTROLLER = "kube-proxy"
"""The name that operators look for: any service proxy reports under it."""

_MAX_NOTE, _MAX_NAME = 1024, 253
"""Limits of the API server in bytes: with a longer one it refuses the whole event."""

_SILENCE = 10.0
"""Seconds without a byte after which the answer is given up."""


def write_event(
    access: CurrentAccess, host: str, observe: Observe, event: ClusterEvent, happened: int
) -> None:
    """Write *event* to the API server of *access*. *happened*: its time in nanoseconds since the epoch.

    Uses a connection of its own: events are rare. *host*: this machine's name, the reporter of the event.
    *observe* is called for the request. Raises NotWritten. Not thread-safe.
    """
    namespace = event.namespace or "default"
    body = json.dumps(_document(event, namespace, happened, host)).encode()
    try:
        status, answer = _post(access, observe, f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", body)
    except (OSError, AccessError, ProtocolError) as error:
        raise NotWritten(str(error), again=True) from error
    if status >= 300:
        again = status >= 500 or status in (401, 429)
        raise NotWritten(f"{status} {answer[:200].decode(errors='replace')}", again)


def _post(current: CurrentAccess, observe: Observe, target: str, body: bytes) -> tuple[int, bytes]:
    current.keep_up()
    access = current.now
    transport = Transport(access)
    started, code, received = time.monotonic(), "<error>", None
    try:
        response = transport.post(target, body, _SILENCE)
        answer = response.read_all(MAX_REFUSAL)
        code, received = str(response.status), len(answer)
    finally:
        transport.close()
        observe(ApiRequest(
            access.authority, code, 0.0, time.monotonic() - started, received, "POST", len(body)))
    if response.status == 401:
        current.renew(access)
    return response.status, answer


def _document(event: ClusterEvent, namespace: str, happened: int, host: str) -> dict[str, object]:
    # As in kube-proxy, the uid is the name.
    regarding = {"kind": event.kind, "name": event.name, "uid": event.name}
    if event.namespace:
        regarding |= {"namespace": event.namespace, "uid": f"{event.namespace}/{event.name}"}
    seconds, rest = divmod(happened, 1_000_000_000)
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": _name(event.name, f".{happened:x}"), "namespace": namespace},
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
    """Return the name of an event, cut where that of the longest node leaves no room for *suffix*."""
    return regarding[:_MAX_NAME - len(suffix)].rstrip(".-") + suffix

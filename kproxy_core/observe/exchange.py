"""The framing of HTTP/1 requests and answers by h11. No I/O."""

from http import HTTPStatus

import h11

from kproxy_core.observe.messages import Answer, HttpError, Request

LONGEST_HEAD = 16 * 1024
LONGEST_BODY = 64 * 1024


class Exchange:
    """One connection's only request and its answer."""

    def __init__(self) -> None:
        self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=LONGEST_HEAD)
        self._request: h11.Request | None = None
        self._body = bytearray()

    def receive(self, data: bytes) -> Request | None:
        """Take in *data*. Return the request once it is complete, its body included. Raises HttpError."""
        try:
            self._connection.receive_data(data)
            while True:
                match self._connection.next_event():
                    case h11.Request() as request:
                        self._request = request
                        length = dict(request.headers).get(b"content-length", b"0")
                        if len(length) > 9 or int(length) > LONGEST_BODY:
                            raise HttpError(413)
                    case h11.Data() as part:
                        self._body += part.data
                        if len(self._body) > LONGEST_BODY:
                            raise HttpError(413)
                    case h11.EndOfMessage():
                        return self._complete()
                    case _:
                        return None
        except h11.RemoteProtocolError as error:
            raise HttpError(error.error_status_hint) from error
        except ValueError as error:  # from h11, for a length with thousands of digits
            raise HttpError(400) from error

    def render(self, answer: Answer, date: str) -> bytes:
        """Return the bytes of *answer*, sent at *date* (RFC 9110), after which the connection ends."""
        headers = [
            ("Content-Type", answer.content_type), ("X-Content-Type-Options", "nosniff"), *answer.headers,
            ("Date", date), ("Content-Length", str(len(answer.body))), ("Connection", "close"),
        ]
        with_body = self._request is None or self._request.method != b"HEAD"
        parts = (
            h11.Response(status_code=answer.status, headers=headers, reason=HTTPStatus(answer.status).phrase),
            h11.Data(data=answer.body if with_body else b""),
            h11.EndOfMessage(),
        )
        return b"".join(self._connection.send(part) or b"" for part in parts)

    def _complete(self) -> Request:
        assert self._request is not None
        if not self._request.http_version.startswith(b"1."):
            raise HttpError(505)
        fields = {name: value.decode("latin-1") for name, value in self._request.headers}
        host = fields.get(b"host", "")
        target = self._request.target.decode("latin-1")
        if target.startswith("http://"):
            host, _, rest = target.removeprefix("http://").partition("/")
            target = f"/{rest}"
        if not target.startswith("/"):
            raise HttpError(400)
        path, _, query = target.partition("?")
        accept = b",".join(value for name, value in self._request.headers if name == b"accept")
        method = self._request.method.decode()
        return Request(
            method, path, query, accept.decode("latin-1"), bytes(self._body), host,
            fields.get(b"origin", ""), fields.get(b"sec-fetch-site", ""), fields.get(b"sec-fetch-mode", ""))

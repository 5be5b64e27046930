"""The content types in which an API server sends objects."""

JSON = "application/json"

PROTOBUF = "application/vnd.kubernetes.protobuf"

PROTOBUF_OR_JSON = f"{PROTOBUF},{JSON}"
"""An Accept header: JSON from servers, and proxies, that know no protobuf."""


def accept_header(configured: str) -> str | None:
    """Return the Accept header for *configured*, content types separated by commas, the preferred one first.

    None: it names neither type.
    """
    for name in configured.split(","):
        if is_protobuf(name):
            return PROTOBUF_OR_JSON
        if _media_type(name) == JSON:
            return JSON
    return None


def is_protobuf(content_type: str) -> bool:
    """Return whether *content_type*, perhaps with parameters, is that of protobuf."""
    return _media_type(content_type) == PROTOBUF


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()

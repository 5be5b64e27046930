"""The fields of one protobuf message, without a copy: lists are too large to be parsed as one."""

from collections.abc import Iterator

from google.protobuf.message import DecodeError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_SHIFT = 63


def byte_fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of each field of strings, bytes or messages. Raises DecodeError."""
    position, end = 0, len(message)
    try:
        while position < end:
            tag, position = _varint(message, position)
            kind = tag & 7
            if kind == _BYTES:
                size, start = _varint(message, position)
                position = start + size
                if position > end:
                    raise DecodeError("truncated")
                yield tag >> 3, message[start:position]
            elif kind == _VARINT:
                _, position = _varint(message, position)
            elif kind in (_FIXED64, _FIXED32):
                position += 8 if kind == _FIXED64 else 4
            else:
                raise DecodeError(f"a field of type {kind}")
    except IndexError:
        raise DecodeError("truncated") from None


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Return the number at *position*, and the position after it."""
    value = message[position]
    position += 1
    if value < 128:
        return value, position
    value &= 127
    for shift in range(7, _MAX_SHIFT + 1, 7):
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise DecodeError("a number of more than 64 bits")

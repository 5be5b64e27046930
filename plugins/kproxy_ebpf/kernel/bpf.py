"""The system call bpf(2) for maps, programs, links and pins (linux/bpf.h). All functions raise OSError."""

import ctypes
import errno
import os
import platform
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_NUMBER = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_libc = ctypes.CDLL(None, use_errno=True)

(
    _MAP_CREATE, _MAP_LOOKUP, _MAP_UPDATE, _MAP_DELETE, _MAP_NEXT_KEY, _PROG_LOAD, _OBJ_PIN, _OBJ_GET,
) = range(8)  # fmt: skip
_PROG_BY_ID, _INFO_BY_FD, _PROG_QUERY, _BTF_LOAD = 13, 15, 16, 18
_LOOKUP_BATCH, _UPDATE_BATCH, _DELETE_BATCH, _LINK_CREATE, _LINK_UPDATE, _LINK_DETACH = 24, 26, 27, 28, 29, 34

_ATTRIBUTES = 144
"""Size in bytes of the passed ``union bpf_attr``. A kernel with a smaller one accepts zeros in the rest."""
_BATCH_ATTRIBUTES = 56
_INFO_SIZE = 256
_MAPS_AT_MOST = 64
"""BPF_MAX_USED_MAPS (linux/bpf_verifier.h)"""
_BATCH_COUNT = 32
"""Offset of the number of elements; on return, also after an error, of those that were handled."""
_CHUNK = 4096
"""Limit for the elements of one reading call."""
_ALLOCATION_PATIENCE = 1.0
"""Timeout in seconds. A hash without preallocation fails with ENOMEM while Linux 6.1 and later refill its
free list."""

SK_STORAGE = 24
_CGROUP_INFO = struct.Struct("=IIIxxxxQI")


class MapDefinition(NamedTuple):
    """The properties of a map. Sizes in bytes."""

    type: int
    key: int
    value: int
    entries: int
    flags: int


class LinkInfo(NamedTuple):
    """A cgroup link as the kernel describes it."""

    program: int
    """Id of the program."""
    cgroup: int
    """Id of the cgroup; 0 once the link was detached or the cgroup removed."""


def create_map(name: str, definition: MapDefinition) -> int:
    kind, key, value, entries, flags = definition
    types = 0
    try:
        if kind == SK_STORAGE:  # The kernel wants types for it: an int and a struct of the value's size.
            types = _load_types(value)
        return _call(_MAP_CREATE, struct.pack(
            "=IIIIIII16sIIII", kind, key, value, entries, flags, 0, 0, name[:15].encode(), 0,
            types, 1 if types else 0, 2 if types else 0,
        ))[0]  # fmt: skip
    finally:
        if types:
            os.close(types)


def map_definition(fd: int) -> MapDefinition:
    kind, _, key, value, entries, flags = struct.unpack_from("=IIIIII", _info(fd))
    return MapDefinition(kind, key, value, entries, flags)


def update(fd: int, key: bytes, value: bytes) -> None:
    """Set one element; retry for a while if memory is short."""
    keys, values = _buffer(key), _buffer(value)
    deadline = time.monotonic() + _ALLOCATION_PATIENCE
    while True:
        try:
            _call(_MAP_UPDATE, struct.pack("=IxxxxQQQ", fd, _at(keys), _at(values), 0))
            return
        except OSError as error:
            if error.errno != errno.ENOMEM or time.monotonic() > deadline:
                raise
            time.sleep(0.002)


def lookup(fd: int, key: bytes, size: int) -> bytes | None:
    """Return the value of *size* bytes of one element; None: it does not exist."""
    wanted, found = _buffer(key), ctypes.create_string_buffer(size)
    try:
        _call(_MAP_LOOKUP, struct.pack("=IxxxxQQQ", fd, _at(wanted), _at(found), 0))
    except FileNotFoundError:
        return None
    return found.raw


def update_all(fd: int, elements: dict[bytes, bytes]) -> None:
    """Set *elements*. Each becomes visible on its own. E2BIG: the map is full."""
    keys, values = list(elements), list(elements.values())
    if not keys:
        return
    if len(keys) == 1:
        update(fd, keys[0], values[0])
        return
    done = 0
    deadline = time.monotonic() + _ALLOCATION_PATIENCE
    while done < len(keys):
        count = len(keys) - done
        handled, error = _batch(
            _UPDATE_BATCH, fd, _buffer(b"".join(keys[done:])), count, _buffer(b"".join(values[done:]))
        )
        done += handled
        if handled:
            deadline = time.monotonic() + _ALLOCATION_PATIENCE
        if error == errno.ENOMEM and time.monotonic() < deadline:
            time.sleep(0.002)
        elif error:
            raise OSError(error, os.strerror(error))


def delete_all(fd: int, keys: list[bytes]) -> None:
    """Delete *keys*; ignores missing ones."""
    done = 0
    while done < len(keys):
        handled, error = _batch(_DELETE_BATCH, fd, _buffer(b"".join(keys[done:])), len(keys) - done)
        done += handled
        if error == errno.ENOENT:
            done += 1
        elif error:
            raise OSError(error, os.strerror(error))


def elements(fd: int, definition: MapDefinition) -> Iterator[tuple[bytes, bytes]]:
    chunk, position, first = _CHUNK, ctypes.create_string_buffer(max(definition.key, 8)), 0
    while True:
        keys = ctypes.create_string_buffer(definition.key * chunk)
        values = ctypes.create_string_buffer(definition.value * chunk)
        handled, error = _batch(_LOOKUP_BATCH, fd, keys, chunk, values, start=first, position=position)
        if error == errno.ENOSPC:  # One bucket has more elements than the chunk.
            chunk *= 2
            continue
        if error not in (0, errno.ENOENT):
            raise OSError(error, os.strerror(error))
        keys_read, values_read = keys.raw, values.raw
        for at in range(handled):
            yield (keys_read[at * definition.key : (at + 1) * definition.key],
                   values_read[at * definition.value : (at + 1) * definition.value])  # fmt: skip
        if error:
            return
        first = _at(position)


def load_program(kind: int, attach_type: int, name: str, code: bytes) -> int:
    """Return the descriptor of a program. An error's second argument ends with the verifier's log.

    The log is requested only after a failure: writing it takes half of the verifier's time.
    """
    instructions, license_ = _buffer(code), _buffer(b"GPL\0")

    def load(level: int, size: int, log: int) -> int:
        attributes = struct.pack(
            "=IIQQIIQII16sII", kind, len(code) // 8, _at(instructions), _at(license_), level, size, log,
            0, 0, name[:15].encode(), 0, attach_type,
        )  # fmt: skip
        return _call(_PROG_LOAD, attributes)[0]

    with suppress(OSError):
        return load(0, 0, 0)
    log = ctypes.create_string_buffer(1 << 16)
    try:
        return load(1, len(log), _at(log))
    except OSError as error:
        told = log.value.decode(errors="replace").strip()[-500:]
        raise OSError(error.errno, f"{error.strerror}: {told}" if told else error.strerror) from None


def create_link(program: int, cgroup: int, attach_type: int) -> int:
    """Attach a program to a cgroup beside those of others; return the link's descriptor."""
    return _call(_LINK_CREATE, struct.pack("=IIII", program, cgroup, attach_type, 0))[0]


def update_link(link: int, program: int) -> None:
    """Replace the program of a link atomically."""
    _call(_LINK_UPDATE, struct.pack("=IIII", link, program, 0, 0))


def detach_link(link: int) -> None:
    """Detach a link, whichever processes hold it."""
    _call(_LINK_DETACH, struct.pack("=I", link))


def link_info(link: int) -> LinkInfo:
    _, _, program, cgroup, _ = _CGROUP_INFO.unpack_from(_info(link))
    return LinkInfo(program, cgroup)


def identity(fd: int) -> int:
    """Return the id of a program or of a map."""
    return int(struct.unpack_from("=II", _info(fd))[1])


def maps_of(program: int) -> frozenset[int]:
    """Return the ids of the maps that a program uses (struct bpf_prog_info: nr_map_ids, map_ids)."""
    ids = (ctypes.c_uint32 * _MAPS_AT_MOST)()
    wanted = bytearray(_INFO_SIZE)
    struct.pack_into("=IQ", wanted, 52, len(ids), ctypes.addressof(ids))
    return frozenset(ids[: struct.unpack_from("=I", _info(program, bytes(wanted)), 52)[0]])


def program_name(identity: int) -> str:
    """Return the name of any program by its id. Needs CAP_SYS_ADMIN."""
    fd = _call(_PROG_BY_ID, struct.pack("=I", identity))[0]
    try:
        return _info(fd)[64:80].rstrip(b"\0").decode(errors="replace")
    finally:
        os.close(fd)


def attached(cgroup: int, attach_type: int) -> list[int]:
    """Return the ids of all programs attached to the cgroup and to its ancestors."""
    ids = (ctypes.c_uint32 * 64)()
    query = struct.pack("=IIIIQI", cgroup, attach_type, 1, 0, ctypes.addressof(ids), 64)
    _, answer = _call(_PROG_QUERY, query)
    return list(ids[: struct.unpack_from("=I", answer, 24)[0]])


def pin(fd: int, path: str) -> None:
    """Pin the object in a BPF file system, so that it outlives this process."""
    name = _buffer(os.fsencode(path) + b"\0")
    _call(_OBJ_PIN, struct.pack("=QII", _at(name), fd, 0))


def open_pin(path: str) -> int:
    """Return a descriptor of the object that is pinned at *path*."""
    name = _buffer(os.fsencode(path) + b"\0")
    return _call(_OBJ_GET, struct.pack("=QII", _at(name), 0, 0))[0]


def _batch(
    command: int, fd: int, keys: ctypes.Array[ctypes.c_char], count: int,
    values: ctypes.Array[ctypes.c_char] | None = None, *, start: int = 0,
    position: ctypes.Array[ctypes.c_char] | None = None,
) -> tuple[int, int]:
    """Run a batch; return how many elements were handled, and the errno that ended it or 0."""
    where, into = _at(position) if position else 0, _at(values) if values else 0
    attributes = struct.pack("=QQQQIIQQ", start, where, _at(keys), into, count, fd, 0, 0)
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES)
    ctypes.set_errno(0)
    failed = _libc.syscall(_number(), command, buffer, _BATCH_ATTRIBUTES) < 0
    handled = struct.unpack_from("=I", buffer, _BATCH_COUNT)[0]
    error = ctypes.get_errno() if failed else 0
    return (0 if error == errno.EFAULT else handled), error


def _load_types(size: int) -> int:
    """Return the descriptor of type information with an int and a struct of *size* bytes (linux/btf.h)."""
    types = struct.pack("=IIII", 1, 1 << 24, 4, 1 << 24 | 32) + struct.pack("=III", 5, 4 << 24, size)
    strings = b"\0int\0value\0"
    blob = _buffer(struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
                   + types + strings)  # fmt: skip
    return _call(_BTF_LOAD, struct.pack("=QQIIII", _at(blob), 0, len(blob), 0, 0, 0))[0]


def _info(fd: int, wanted: bytes = b"") -> bytes:
    """Return the kernel's info about an object. *wanted*: addresses for its lists, laid out as the answer."""
    info = ctypes.create_string_buffer(wanted, _INFO_SIZE)
    _call(_INFO_BY_FD, struct.pack("=IIQ", fd, len(info), _at(info)))
    return info.raw


def _call(command: int, attributes: bytes) -> tuple[int, bytes]:
    """Return the result of the system call, and the attributes as the kernel left them."""
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES)
    answer = _libc.syscall(_number(), command, buffer, _ATTRIBUTES)
    if answer < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return answer, buffer.raw


def _number() -> int:
    machine = platform.machine()
    if machine not in _NUMBER:
        raise OSError(errno.ENOSYS, f"bpf(2) is not known on {machine}")
    return _NUMBER[machine]


def _buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(data, len(data))


def _at(buffer: ctypes.Array[ctypes.c_char]) -> int:
    return ctypes.addressof(buffer)

"""Programs of classic BPF that decide which datagrams a socket receives (linux/filter.h)."""

import ctypes
import socket
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

_SO_ATTACH_FILTER: Final = 26

LOAD_WORD, JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_LOAD_HALF, _LOAD_BYTE, _LOAD_BYTE_BEHIND_X = 0x28, 0x30, 0x50
_SET, _SET_X, _A_TO_X, _JUMP_IF_EQUAL_X = 0x00, 0x01, 0x07, 0x1D
_FIND, _FIND_WITHIN = 0xFFFFF00C, 0xFFFFF010
"""SKF_AD_NLATTR, SKF_AD_NLATTR_NEST."""


class Instruction(NamedTuple):
    """An instruction as the kernel reads it: jumps skip so many instructions."""

    code: int
    if_true: int
    if_false: int
    value: int


class Step(NamedTuple):
    """An instruction whose jumps lead to labels; "": to the next instruction."""

    code: int
    value: int = 0
    if_true: str = ""
    if_false: str = ""


Program = tuple[Instruction, ...]

ACCEPT: Final = Step(_RETURN, 0xFFFFFFFF)
DROP: Final = Step(_RETURN, 0)
A_TO_X: Final = Step(_A_TO_X)
FIND_ATTRIBUTE: Final = Step(LOAD_WORD, _FIND)
"""Load the offset of the netlink attribute of kind X, searched from offset A; 0: there is none."""
FIND_ATTRIBUTE_WITHIN: Final = Step(LOAD_WORD, _FIND_WITHIN)
"""As `FIND_ATTRIBUTE`, among the attributes within the one at offset A."""


def set_a(value: int) -> Step:
    return Step(_SET, value)


def set_x(value: int) -> Step:
    return Step(_SET_X, value)


def load(size: int, offset: int) -> Step:
    """Load a big-endian number of *size* bytes. The headers of netlink are in the order of the host."""
    return Step({1: _LOAD_BYTE, 2: _LOAD_HALF, 4: LOAD_WORD}[size], offset)


def load_byte_behind_x(offset: int) -> Step:
    return Step(_LOAD_BYTE_BEHIND_X, offset)


def if_equal(value: int, label: str) -> Step:
    return Step(JUMP_IF_EQUAL, value, if_true=label)


def unless_equal(value: int, label: str) -> Step:
    return Step(JUMP_IF_EQUAL, value, if_false=label)


def unless_equal_x(label: str) -> Step:
    return Step(_JUMP_IF_EQUAL_X, if_false=label)


def assemble(*steps: Step | str) -> Program:
    """Return the program of *steps*. A string is a label: earlier steps jump to the step behind it.

    Raises ValueError for a jump that leads back or too far, KeyError for one to no label.
    """
    places: dict[str, int] = {}
    numbered: list[Step] = []
    for step in steps:
        if isinstance(step, str):
            places[step] = len(numbered)
        else:
            numbered.append(step)

    def skipped(at: int, label: str) -> int:
        distance = places[label] - at - 1 if label else 0
        if not 0 <= distance < 256:
            raise ValueError(f"instruction {at} cannot jump to {label!r}: {distance} instructions")
        return distance

    return tuple(
        Instruction(step.code, skipped(at, step.if_true), skipped(at, step.if_false), step.value)
        for at, step in enumerate(numbered))


def attach(sock: socket.socket, program: Sequence[Instruction]) -> None:
    """Have *sock* receive only what *program* accepts. Raises OSError."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    fprog = struct.pack("HP", len(program), ctypes.addressof(buffer))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)

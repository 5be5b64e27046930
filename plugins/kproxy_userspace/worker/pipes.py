"""Pipes through which splice(2) moves bytes from socket to socket, lent only while bytes are under way."""

import contextlib
import fcntl
import os
from typing import NamedTuple

PIPE_SIZE = 1 << 19
"""Bytes that one call moves at most; pipe-max-size lets everybody have this."""

_MOST_SPARE = 64


class Pipe(NamedTuple):
    """Both ends of a pipe."""

    read: int
    write: int


class Pipes:
    """The pipes of one worker. Ten thousand idle connections need none."""

    def __init__(self) -> None:
        self._spare: list[Pipe] = []

    def take(self) -> Pipe:
        """An empty pipe. Raises OSError if there are no more descriptors."""
        if self._spare:
            return self._spare.pop()
        pipe = Pipe(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        with contextlib.suppress(OSError):  # The user's share of pipe memory is used up: 64 KiB do too.
            fcntl.fcntl(pipe.write, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        return pipe

    def give_back(self, pipe: Pipe, *, empty: bool = True) -> None:
        """*pipe* is no longer needed. One that still holds bytes is not lent again."""
        if empty and len(self._spare) < _MOST_SPARE:
            self._spare.append(pipe)
        else:
            os.close(pipe.read)
            os.close(pipe.write)

"""Small files of this program that no other user may write or read."""

import os
import stat
from pathlib import Path


def read_private(path: Path, most: int) -> bytes:
    """Return the bytes of *path*. Raises OSError, or ValueError if it is no file of *most* bytes or fewer."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"longer than {most} bytes")
    return content


def replace_private(path: Path, content: bytes) -> None:
    """Write *path* as a whole, in a directory that is created if necessary. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(new, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)

"""The open files of a process, as the kernel lists them in /proc."""

import os
from contextlib import suppress
from pathlib import Path


def open_files(pid: int) -> dict[int, str]:
    """Return the names of a process's open files by descriptor. Raises OSError if the process has ended."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # Closed since it was listed, as is the listing's own descriptor.
            found[int(link.name)] = os.readlink(link)
    return found

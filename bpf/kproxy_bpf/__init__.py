"""The BPF programs of the ebpf mode: C source, the few headers that it needs, and in wheels the result.

Imports nothing but the standard library, because setup.py runs this file.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

DIRECTORY = Path(__file__).parent
SOURCE = DIRECTORY / "services.c"
COMPILER = DIRECTORY / "compile.py"
"""The script that compiles the source with bcc."""


def arguments(programs: Sequence[str], maps: Sequence[str], script: Path = COMPILER) -> list[str]:
    """Return the arguments with which an interpreter that finds bcc prints the compiled *programs*."""
    return ["-I", "-B", str(script), str(SOURCE), str(DIRECTORY), ",".join(programs), ",".join(maps)]


def file_name(programs: Sequence[str], maps: Sequence[str], script: Path = COMPILER) -> str:
    """Return the name of the file with the compiled *programs*: another one if anything differs.

    They are the same for all kernels and processors of one byte order: the source reads no structure of the
    kernel but those of its user-space interface (linux/bpf.h), as the headers here declare them.
    """
    digest = hashlib.sha256(f"{sys.byteorder} {programs!r} {maps!r}".encode())
    for path in (script, SOURCE, *sorted(DIRECTORY.rglob("*.h"))):
        digest.update(path.read_bytes())
    return f"ebpf-{digest.hexdigest()[:32]}.json"

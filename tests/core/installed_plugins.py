"""Plugins as users install them: a module and the metadata of a distribution, on Python's path."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def install(
    directory: Path, distribution: str, entry_points: Mapping[str, str], group: str = "kproxy.backends",
    **modules: str,
) -> None:
    """Put *distribution* 1.0 into *directory*: *modules* by name, and backends by mode.

    *group*: that of the entry points. The name of a distribution has no dashes, as that of its directory.
    """
    for name, source in modules.items():
        (directory / f"{name}.py").write_text(source, encoding="utf-8")
    metadata = directory / f"{distribution}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = [f"{mode} = {target}" for mode, target in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


@contextmanager
def on_path(directory: Path) -> Iterator[None]:
    """Let Python find what is in *directory*, and forget it afterwards."""
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        importlib.invalidate_caches()
        for path in directory.glob("*.py"):
            sys.modules.pop(path.stem, None)

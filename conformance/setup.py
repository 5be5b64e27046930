"""Gives the kit the version of the kproxy beside it, which it requires. The rest is in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import setup  # type: ignore[import-untyped]

VERSION = runpy.run_path(str(Path.cwd().parent / "kproxy_core/config/release.py"))["version_to_build"]()

setup(version=VERSION, install_requires=[
    f"kproxy == {VERSION}", "msgspec >= 0.18", "pyroute2 >= 0.7.12", "pytest >= 8", "pyyaml >= 6.0.1",
    "wsproto >= 1.2",
])

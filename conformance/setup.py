"""Gives the kit the version of the kproxy beside it, which it requires. The rest is in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import setup  # type: ignore[import-untyped]

BESIDE = runpy.run_path(str(Path.cwd().parent / "setup.py"))

setup(
    version=BESIDE["VERSION"],
    cmdclass={name: command for name, command in BESIDE["COMMANDS"].items() if name == "bdist_wheel"},
    install_requires=[
        f"kproxy == {BESIDE['VERSION']}", "msgspec >= 0.18", "pyroute2 >= 0.7.12", "pytest >= 8",
        "pyyaml >= 6.0.1", "wsproto >= 1.2",
    ],
)

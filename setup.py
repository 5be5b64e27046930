"""Records the commit in wheels and sdists that are built from a checkout. Everything else is in setup.cfg."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist


def record(directory: str) -> None:
    """Write the commit of these sources to the copy of them in *directory*, for ``kproxy --version``."""
    commit = runpy.run_path("kproxy_core/config/release.py")["commit"]()
    if commit:
        Path(directory, "kproxy_core", "COMMIT").write_text(f"{commit}\n", encoding="ascii")


class Build(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            record(self.build_lib)


class SourceDistribution(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        record(base_dir)


setup(cmdclass={"build_py": Build, "sdist": SourceDistribution})

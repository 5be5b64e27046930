"""Makes builds reproducible, and records the version and the commit in what is built from a checkout.

Other metadata is in pyproject.toml, the list of packages in setup.cfg. The kit's setup.py uses this one.
"""

import gzip
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1
    try:
        from wheel.bdist_wheel import bdist_wheel
    except ImportError:  # not asked for a wheel yet
        bdist_wheel = None

HERE = Path(__file__).resolve().parent
RELEASE = runpy.run_path(str(HERE / "kproxy_core/config/release.py"))
VERSION = RELEASE["version_to_build"]()


def time_of_sources() -> int:
    """Return the seconds since the epoch at the commit; in an unpacked sdist too, else now."""
    if (HERE / ".git").exists() and shutil.which("git"):
        git = ["git", f"--git-dir={HERE / '.git'}", "log", "-1", "--format=%ct"]
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return int(done.stdout)
    metadata = HERE / "PKG-INFO"
    return int(metadata.stat().st_mtime if metadata.exists() else time.time())


def record(directory: str) -> None:
    """Write the version and the commit of these sources to the copy of them in *directory*."""
    text = f"{VERSION} {RELEASE['commit']()}\n"
    Path(directory, "kproxy_core", "VERSION").write_text(text, encoding="ascii")


def compiled_programs() -> tuple[str, bytes]:
    """Return the name and content of the file with the compiled BPF programs. Raises OSError.

    The first Python that finds bcc compiles them: the one that builds, or the distribution's.
    """
    bpf = runpy.run_path(str(HERE / "bpf/kproxy_bpf/__init__.py"))
    names = runpy.run_path(str(HERE / "plugins/kproxy_ebpf/names.py"))
    programs, maps = tuple(names["KINDS"]), names["MAPS"]
    said = "there is no Python with bcc"
    for python in (sys.executable, "/usr/bin/python3"):
        done = subprocess.run([python, *bpf["arguments"](programs, maps)], capture_output=True, check=False)
        if done.returncode == 0:
            return bpf["file_name"](programs, maps), done.stdout
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise OSError(said)


def reset_modes(directory: str) -> None:
    """Remove what umask and checkout made of the modes of the files in *directory*."""
    for path in Path(directory).rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def reset(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove what differs from one checkout to the next from an entry of an sdist."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mtime = int(os.environ["SOURCE_DATE_EPOCH"])
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry


class Build(build_py):
    """Packs what exists now, with the version, the commit and compiled BPF programs."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # modules that are deleted by now
        super().run()
        if not self.editable_mode:
            record(self.build_lib)
            self.compile_programs()
            reset_modes(self.build_lib)

    def compile_programs(self) -> None:
        """Add the BPF programs, compiled. Where that fails, a machine in mode ebpf compiles them itself."""
        try:
            name, content = compiled_programs()
        except OSError as error:
            self.warn(f"no BPF programs are packed, because they cannot be compiled here: {error}")
        else:
            Path(self.build_lib, "kproxy_bpf", name).write_bytes(content)


class SourceDistribution(sdist):
    """Packs the same files as the same bytes, with the version and the commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        record(base_dir)

    def make_archive(self, base_name: str, *_: object, base_dir: str, **__: object) -> str:
        """Write a .tar.gz, whatever the format: no package index takes another one."""
        path = f"{base_name}.tar.gz"
        with (open(path, "wb") as file,
              gzip.GzipFile("", "wb", fileobj=file, mtime=int(os.environ["SOURCE_DATE_EPOCH"])) as compressed,
              tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive):
            archive.add(base_dir, filter=reset)  # in the order of names
        return path


COMMANDS = {"build_py": Build, "sdist": SourceDistribution}

if bdist_wheel is not None:
    class Wheel(bdist_wheel):
        """Packs metadata, licence and manual with the same modes, too."""

        def write_wheelfile(self, wheelfile_base: str, *arguments: object, **options: object) -> None:
            super().write_wheelfile(wheelfile_base, *arguments, **options)  # the last before they are packed
            reset_modes(str(Path(wheelfile_base).parent))

    COMMANDS["bdist_wheel"] = Wheel

os.environ.setdefault("SOURCE_DATE_EPOCH", str(time_of_sources()))
if __name__ == "__main__":
    # The image is built without the manual.
    setup(version=VERSION, cmdclass=COMMANDS,
          data_files=[("share/man/man8", sorted(map(str, Path("docs/man").glob("*.8"))))])

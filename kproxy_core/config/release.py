"""The version of this code and its commit: recorded by the build, else read from the checkout."""

import os  # and no pathlib, for every process of kproxy imports this
from contextlib import suppress

SOURCES = "1.0.0.dev0"
"""The version of these sources (PEP 440), which all others are made of. `make release` removes ``.dev0``."""

_DEVELOPMENT = ".dev0"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_RECORDED = f"{_PACKAGE}/VERSION"
"""Written when a package or an image is built: the version and the commit, one of which may be empty."""
_SHOWN = 12


def version() -> str:
    """Return the version; between releases with the commit, such as ``1.0.0.dev0+g0123456789ab``."""
    return _recorded()[0] or _made(0, commit())


def commit() -> str:
    """Return the abbreviated commit, as recorded or from the checkout; "" if neither is known."""
    with suppress(OSError):
        return (_recorded()[1] or _of_checkout())[:_SHOWN]
    return ""


def described(version: str, commit: str) -> str:
    """Return *version* for people, followed by *commit* in parentheses unless that is a part of it."""
    return version if not commit or commit in version else f"{version} ({commit})"


def version_to_build() -> str:
    """Return the version of a package that is built from these sources now.

    Between releases it has the number of commits, by which packages sort, such as
    ``1.0.0.dev1583+g0123456789ab``. ``.dirty`` follows if the checkout has changes that are not committed.
    Runs git, which no start of kproxy does. Without git or a repository, it is `version`.
    """
    import shutil
    import subprocess

    root = os.path.dirname(_PACKAGE)
    if not os.path.exists(f"{root}/.git") or not shutil.which("git"):
        return version()

    def git(*words: str) -> str:
        command = ["git", f"--git-dir={root}/.git", f"--work-tree={root}", *words]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    is_shallow = git("rev-parse", "--is-shallow-repository") == "true"
    commits = 0 if is_shallow else int(git("rev-list", "--count", "HEAD"))
    return _made(commits, git("rev-parse", "HEAD")[:_SHOWN], dirty=bool(git("status", "--porcelain")))


def _made(commits: int, commit: str, *, dirty: bool = False) -> str:
    release = SOURCES.removesuffix(_DEVELOPMENT)
    is_released = release == SOURCES
    local = [f"g{commit}"] if commit and (dirty or not is_released) else []
    local += ["dirty"] if dirty else []
    development = "" if is_released else f".dev{commits}"
    return f"{release}{development}{'+' if local else ''}{'.'.join(local)}"


def _recorded() -> tuple[str, str]:
    try:
        version, _, commit = _text(_RECORDED).partition(" ")
    except FileNotFoundError:
        return "", ""
    return version, commit


def _of_checkout() -> str:
    git = os.path.join(os.path.dirname(_PACKAGE), ".git")
    if os.path.isfile(git):  # a worktree: the file names its directory
        git = os.path.join(os.path.dirname(git), _text(git).removeprefix("gitdir: "))
    head = _text(f"{git}/HEAD")
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    shared = f"{git}/commondir"
    common = os.path.join(git, _text(shared)) if os.path.exists(shared) else git
    if os.path.exists(f"{common}/{name}"):
        return _text(f"{common}/{name}")
    packed = _text(f"{common}/packed-refs")
    return next((line.split()[0] for line in packed.splitlines() if line.endswith(f" {name}")), "")


def _text(path: str) -> str:
    """Return the text of the file at *path* without the last line's end. Raises OSError."""
    with open(path, encoding="utf-8") as file:
        return file.read().rstrip("\n")


if __name__ == "__main__":
    print(version_to_build())

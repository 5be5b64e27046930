"""The commit of this code, for ``kproxy --version``."""

from contextlib import suppress
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_RECORDED = _PACKAGE / "COMMIT"
"""Written when a package or an image is built from a checkout."""
_SHOWN = 12


def commit() -> str:
    """Return the abbreviated commit, from the file COMMIT or from the checkout; "" if neither exists."""
    for read in (_recorded, _of_checkout):
        with suppress(OSError):
            if found := read():
                return found[:_SHOWN]
    return ""


def _recorded() -> str:
    return _RECORDED.read_text(encoding="ascii").strip()


def _of_checkout() -> str:
    git = _PACKAGE.parent / ".git"
    if git.is_file():  # a worktree: the file names its directory
        git = Path(git.read_text(encoding="utf-8").removeprefix("gitdir: ").strip())
    head = (git / "HEAD").read_text(encoding="ascii").strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    shared = git / "commondir"
    common = git / shared.read_text(encoding="utf-8").strip() if shared.exists() else git
    if (common / name).exists():
        return (common / name).read_text(encoding="ascii").strip()
    packed = (common / "packed-refs").read_text(encoding="ascii")
    return next((line.split()[0] for line in packed.splitlines() if line.endswith(f" {name}")), "")

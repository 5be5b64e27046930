"""Commands as an unprivileged user, who cannot enter root's home, where the checkout may be."""

import stat
from pathlib import Path

from tests.rights import require

NOBODY = 65534
_CHECKOUT = Path(__file__).parents[2]
_AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
_OPEN = """
closed=$1 checkout=$2
shift 2
place=$(mktemp -d)
mount --bind "$checkout" "$place"
mount -t tmpfs -o mode=755 none "$closed"
mkdir -p "$checkout"
mount --move "$place" "$checkout"
rmdir "$place"
cd "$checkout"
exec "$@"
"""


def as_nobody(*command: str | Path) -> list[str]:
    """Return *command* as nobody runs it. Of a directory closed to others, he sees the checkout only.

    Raises MissingRight where this process can't become another user.
    """
    require("other users")
    way = reversed(_CHECKOUT.parents)
    closed = next((each for each in way if not each.stat().st_mode & stat.S_IXOTH), None)
    if closed is None:
        return [*_AS_NOBODY, *map(str, command)]
    opened = ("unshare", "--mount", "sh", "-ec", _OPEN, "sh", closed, _CHECKOUT)
    return [*map(str, opened), *_AS_NOBODY, *map(str, command)]

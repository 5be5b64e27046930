"""Pages of docs/ whose commands run."""

import re
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]

_SANDBOX = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-euc"]
_PRIVATE_DIRECTORY = "mount -t tmpfs none /run\n"
_LONGEST = 120
"""Seconds; a page takes a few."""


_MARK = "\f"
"""Printed between the outputs of two blocks."""


def outputs_of(page: Path, directory: Path) -> list[str]:
    """Return what each ``sh`` block of *page* prints; see `printed_by`."""
    return printed_by(page, directory, between=f"printf '{_MARK}'\n").split(_MARK)


def printed_by(page: Path, directory: Path, *, between: str = "") -> str:
    """Run all ``sh`` blocks of *page* in order, and return their standard output.

    *directory* takes the place of the one under /tmp that is called like the page. The environment is there
    already: ``make env`` is left out.
    """
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    script = between.join(block for block in blocks if block != "make env\n")
    script = re.sub(r"/tmp/(hello|modes|debugging|ebpf|standalone|systemd)\b", str(directory), script)
    ran = subprocess.run(
        [*_SANDBOX, _PRIVATE_DIRECTORY + script],
        cwd=CHECKOUT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_LONGEST,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout

"""Pages of docs/ whose commands run."""

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]

_SANDBOX = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-euc"]
_PRIVATE_DIRECTORY = "mount -t tmpfs none /run\n"
_LONGEST = 120
"""Seconds; a page takes a few."""


_MARK = "\f"
"""Printed between the outputs of two blocks."""


_SHOWN = re.compile(
    r"^```sh\n(?!make env\n```).*?^```\n(?:\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
"""A block of commands, and the text below it."""

_VARIES = re.compile(
    r" # handle \d+"
    r"|\d{4}-\d\d-\d\dT[\d:.]+Z "
    r"|(?<=\d):\d+(?= -> | answered)"  # source ports, and those of a trial
    r"|\b\d+ s\b"
    r"|^version  .*?(?=, running)"
    r"|^doctor  .*\n", re.MULTILINE)
"""Handles of rules, times, ports, seconds, the version, and what the doctor finds on this machine."""


Wrapper = Callable[..., Sequence[str]]
"""Returns the command that runs a given one in another way, as `as_nobody` does."""


def expect_outputs(
    page: Path, directory: Path, *, at_least: int, sandbox: Wrapper = lambda *command: command
) -> None:
    """Check that each ``sh`` block of *page* prints the text below it. *at_least* so many have one.

    The shell with all blocks is run by *sandbox*.
    """
    shown = [found[1] for found in _SHOWN.finditer(page.read_text(encoding="utf-8"))]
    printed = outputs_of(page, directory, sandbox=sandbox)
    assert len(printed) == len(shown)
    assert sum(text is not None for text in shown) >= at_least
    for text, output in zip(shown, printed, strict=True):
        if text is not None:
            assert _VARIES.sub("", output) == _VARIES.sub("", text)


def outputs_of(page: Path, directory: Path, *, sandbox: Wrapper = lambda *command: command) -> list[str]:
    """Return what each ``sh`` block of *page* prints; see `printed_by`."""
    return printed_by(page, directory, between=f"printf '{_MARK}'\n", sandbox=sandbox).split(_MARK)


def printed_by(
    page: Path, directory: Path, *, between: str = "", sandbox: Wrapper = lambda *command: command
) -> str:
    """Run all ``sh`` blocks of *page* in order, and return their standard output.

    *directory* takes the place of the one under /tmp that is called like the page. The environment is there
    already: ``make env`` is left out.
    """
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    script = between.join(block for block in blocks if block != "make env\n")
    script = re.sub(r"/tmp/(hello|modes|debugging|ebpf|standalone|systemd)\b", str(directory), script)
    ran = subprocess.run(
        [*sandbox(*_SANDBOX), _PRIVATE_DIRECTORY + script],
        cwd=CHECKOUT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_LONGEST,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout

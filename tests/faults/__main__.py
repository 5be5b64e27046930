"""Plant faults in a copy of this checkout, one at a time: ``python -m tests.faults [NAME...]``.

Each is caught if one of its tests fails, which all pass without it. The exit status is 1 if one is not.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kproxy_conformance.processes import own_name
from tests.faults.faults import FAULTS, Fault

CHECKOUT = Path(__file__).parents[2]
PACKAGES = (".", "plugins", "bpf", "conformance")
IMPORTED = ("kproxy_core", "kproxy_nftables", "kproxy_bpf", "kproxy_conformance", "tests.faults.faults")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", re.MULTILINE)


class Unplantable(Exception):
    """A fault whose text is not in its file, or there twice."""


def planted(fault: Fault, root: Path) -> tuple[Path, str, str]:
    """Return the file of *fault* below *root*, its text as it is, and with the fault. Raises Unplantable."""
    path = root / fault.file
    text = path.read_text(encoding="utf-8")
    if (number := text.count(fault.find)) != 1:
        raise Unplantable(f"{fault.name}: {fault.file} has its text {number} times, not once: {fault.find!r}")
    return path, text, text.replace(fault.find, fault.instead)


class Scratch:
    """A copy of the checkout, from which tests and the processes that they start import everything."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(root / name) for name in PACKAGES), "PYTEST_ADDOPTS": "",
        }  # fmt: skip
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=CHECKOUT,
            stdout=subprocess.PIPE, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (CHECKOUT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(CHECKOUT / name, root / name)
        places = f"import {', '.join(IMPORTED)}; print(*[m.__file__ for m in ({', '.join(IMPORTED)})])"
        done = subprocess.run([sys.executable, "-c", places], cwd=root, env=self._environment,
                              stdout=subprocess.PIPE, text=True, check=True)
        elsewhere = [place for place in done.stdout.split() if not place.startswith(f"{root}/")]
        if elsewhere:
            raise SystemExit(f"imported from elsewhere: {', '.join(elsewhere)}")

    def run(self, *tests: str) -> tuple[int, str]:
        """Run *tests* up to the first failure. Return pytest's exit status and output."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests], cwd=self._root,
            env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, done.stdout

    def failing(self, fault: Fault) -> tuple[str, str]:
        """Return the test that fails with *fault*, "" if none does, and pytest's output."""
        path, text, faulty = planted(fault, self._root)
        try:
            path.write_text(faulty, encoding="utf-8")
            status, output = self.run(*fault.tests)
        finally:
            path.write_text(text, encoding="utf-8")
            # Compiled code is told from a newer one by seconds and size.
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                compiled.unlink()
        found = _FAILED.search(output)
        return (found[1] if status == 1 and found else ""), output


def main(names: Sequence[str]) -> int:
    """Plant the faults of these *names*, or all. Return the exit status."""
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no such fault: {', '.join(unknown)}; known are {', '.join(known)}")
    faults = [known[name] for name in names] or list(FAULTS)
    caught: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix=f"{own_name('faults')}-") as directory:
        scratch = Scratch(Path(directory).resolve())
        for fault in faults:
            planted(fault, CHECKOUT)
        status, output = scratch.run(*dict.fromkeys(test for fault in faults for test in fault.tests))
        if status:
            sys.exit(f"tests fail without a fault:\n{output}")
        for fault in faults:
            began = time.monotonic()
            test, output = scratch.failing(fault)
            seconds = time.monotonic() - began
            if test:
                caught[fault.verb] += 1
                print(f"caught {fault.name} by {test} ({seconds:.0f} s)", flush=True)
            else:
                print(f"NOT CAUGHT {fault.name} by {' '.join(fault.tests)} ({seconds:.0f} s)\n{output}",
                      flush=True)
    by = ", ".join(f"{number} by make {verb}" for verb, number in caught.items())
    print(f"{caught.total()} of {len(faults)} faults caught: {by or 'none'}")
    return caught.total() < len(faults)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Unplantable as problem:
        sys.exit(str(problem))

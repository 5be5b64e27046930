"""Table of harm: how long another Service's change takes meanwhile, as a ratio to the same without harm.

    .venv/bin/python -m tests.bench.harm [WORD]
    tests/guest/run .venv/bin/python -m tests.bench.harm WORD ipvs

As root, on a quiet machine. *WORD*: only kinds whose names contain it. Prints Markdown. The change of a
Service's endpoint has taken effect once a new connection reaches it; the median and the longest of `CHANGES`,
and of more while the hostile objects are not served yet. Memory is the highest, of kproxy and its workers.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from kproxy_conformance.processes import own_name
from tests.harm.kinds import KINDS, NOTHING, ON_HOST, Kind
from tests.harm.room import BYSTANDER, CALM, peak_memory, room
from tests.patience import PATIENCE
from tests.sweep import begin

CHANGES = 21


def measure(kind: Kind, mode: str) -> tuple[list[float], int]:
    """Return the seconds that changes took, and the highest memory in bytes."""
    with (tempfile.TemporaryDirectory(prefix=f"{own_name('bench')}-") as directory,
          room(Path(directory), mode, own_tables=kind.own_tables, **kind.options) as made,
          made.here.proxy(under=kind.under) as proxy):
        made.await_answer(CALM)
        made.await_answer(BYSTANDER)
        with kind.begin(made, proxy):
            began = time.monotonic()
            while len(made.seconds) < CHANGES or not kind.is_there(made):
                assert time.monotonic() < began + PATIENCE, "the harm is not there"
                made.change()
        return made.seconds, peak_memory(proxy)


def main(word: str = "", *modes: str) -> None:
    begin()
    modes = modes or ON_HOST
    plain = {mode: statistics.median(measure(NOTHING, mode)[0]) for mode in modes}
    without = ", ".join(f"{seconds * 1000:.0f} ms ({mode})" for mode, seconds in plain.items())
    print(f"Without harm: {without} in the median.\n")
    print("| harm | mode | median | longest | memory |\n|---|---|---|---|---|")
    for kind in KINDS:
        for mode in (each for each in kind.modes if each in modes and word in kind.name):
            found, memory = measure(kind, mode)
            median = statistics.median(found)
            print(f"| {kind} | {mode} | {median * 1000:.0f} ms, {median / plain[mode]:.1f} times "
                  f"| {max(found):.1f} s | {memory >> 20} MiB |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""``python -m tests.soak``: run a soak, print its tables, and fail if anything but the damage failed."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from kproxy_conformance.processes import own_name
from kproxy_ebpf.kernel import bpf
from kproxy_ebpf.kernel.mounts import mount_bpf_file_system
from kproxy_ebpf.names import ATTACH_TYPES
from tests.sweep import begin


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--modes", default="nftables,iptables,userspace,ebpf", help="in this order")
    parser.add_argument("--rate", type=float, default=50.0, help="changes of objects a second")
    parser.add_argument("--connections", type=int, default=4, help="new ones every 20 ms, of each client")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="for logs and the report")
    arguments = parser.parse_args()
    os.environ["SWITCH_EACH_TICK"] = str(arguments.connections)
    from tests.soak.soak import Soak

    begin()
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="soak-"))
    directory.mkdir(parents=True, exist_ok=True)
    print(f"logs in {directory}", flush=True)
    with ExitStack() as stack:
        cgroup = stack.enter_context(_own_cgroup())
        pins = stack.enter_context(_own_pins(directory))
        modes = arguments.modes.split(",")
        soak = Soak(stack, directory, modes, arguments.rate, arguments.seed, cgroup, pins)
        try:
            soak.run(60 * arguments.minutes)
        except Exception as error:
            soak.ledger.problems.append(repr(error))
            raise
        finally:
            soak.proxy.stop()
            ledger, failures = soak.ledger, soak.failures
            report = "\n\n".join((ledger.event_tables(failures), ledger.total_table()))
            (directory / "report.md").write_text(f"{report}\n")
            (directory / "report.json").write_text(json.dumps(asdict(ledger), indent=1))
            problems = (f"PROBLEM: {problem}" for problem in ledger.problems)
            print(f"\n{report}\n", *problems, sep="\n", flush=True)
    return bool(ledger.problems)


@contextmanager
def _own_cgroup() -> Iterator[Path]:
    """Move this process, and thereby its children, into a new cgroup, and back."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    tree = next(line.split()[1] for line in mounts if line.split()[2] == "cgroup2")
    cgroups = Path("/proc/self/cgroup").read_text().splitlines()
    before = next(line for line in cgroups if line.startswith("0::"))
    _check_that_nobody_translates(Path(tree))
    made = Path(tree, own_name("soak"))
    made.mkdir()
    (made / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield made
    finally:
        Path(tree, before[3:].lstrip("/"), "cgroup.procs").write_text(str(os.getpid()))
        made.rmdir()


def _check_that_nobody_translates(root: Path) -> None:
    """Exit if programs of another proxy translate the connections of every process, those of the soak too."""
    descriptor = os.open(root, os.O_RDONLY)
    for name, attach_type in ATTACH_TYPES.items():
        for program in bpf.attached(descriptor, attach_type):
            found = f"{bpf.program_name(program)} is attached at {name}"
            sys.exit(f"{root}: {found}: end its proxy, or delete its pins")
    os.close(descriptor)


@contextmanager
def _own_pins(directory: Path) -> Iterator[Path]:
    """A directory for pins in a new BPF file system."""
    point = directory / "bpf"
    point.mkdir()
    mount_bpf_file_system(str(point))
    try:
        yield point / "kproxy"
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


if __name__ == "__main__":
    sys.exit(main())

"""What a run of the tests that is killed leaves behind is gone when the next one begins."""

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kproxy_conformance.processes import is_alive, owner
from tests.core.bpf_places import cgroup2_tree
from tests.core.namespaces import namespace
from tests.patience import PATIENCE
from tests.sweep import MARK, NAMESPACES, sweep

CHECKOUT = Path(__file__).parents[2]
BEGIN = """
import os, signal, subprocess, sys, tempfile
from pathlib import Path
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.processes import owner
from tests.core.bpf_places import new_bpf_file_system, new_cgroup
from tests.core.namespaces import Namespace, namespace
from tests.patience import PATIENCE
from tests.sweep import MARK
os.environ[MARK] = owner()
print(owner(), flush=True)
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
"""
STAGES = {
    "a name without a namespace": f"Path('{NAMESPACES}').mkdir(exist_ok=True)\n"
                                  f"Path('{NAMESPACES}', f'kptest-{{owner()}}-0').touch()",
    "a namespace": "Namespace('web')",
    "a cgroup": "held = new_cgroup()\nheld.__enter__()",
    "a cgroup of the node": "NodeCgroup()",
    "a BPF file system": "held = new_bpf_file_system(Path(sys.argv[1], 'bpf'))\nheld.__enter__()",
    "a process": "subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL, start_new_session=True)",
    "a process in a namespace": "where = Namespace()\nwith where.entered(): subprocess.Popen(\n"
                                "    ['sleep', '1000'], stdout=subprocess.DEVNULL, start_new_session=True)",
    "a guest's directory": "tempfile.mkdtemp(prefix=f'guests-{owner()}-')",
}


def left_by(made_by: str, directory: Path) -> list[str]:
    """Return what *made_by* has left, as ip(8), mount(8), ps(1) and ls(1) would show it."""
    places = (NAMESPACES, cgroup2_tree(), Path("/tmp"), directory)
    found = [str(path) for place in places if place.exists() for path in place.glob(f"*{made_by}*")]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if made_by in line]
    for path in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{MARK}={made_by}".encode() in (path / "environ").read_bytes()
            # A killed process is a zombie until its new parent waits for it.
            if marked and (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(path.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_killed_run_left_is_swept(stage: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{BEGIN}{STAGES[stage]}\ndie()", str(tmp_path)], cwd=CHECKOUT,
        stdout=subprocess.PIPE, text=True, check=False, env={**os.environ, "TMPDIR": "/tmp"},
    )  # fmt: skip
    assert done.returncode == -9
    made_by = done.stdout.strip()
    assert not is_alive(made_by)
    assert left_by(made_by, tmp_path)
    sweep()
    assert eventually_nothing(made_by, tmp_path) == []


def eventually_nothing(made_by: str, directory: Path) -> list[str]:
    """Return what is left once the processes that were killed have ended."""
    for path in left_by(made_by, directory):
        if path.isdigit():
            with suppress(ProcessLookupError), os.fdopen(os.pidfd_open(int(path))) as handle:
                select.select([handle], [], [], PATIENCE)
    return left_by(made_by, directory)


def test_what_a_living_run_uses_is_kept() -> None:
    """Of this run, and of one whose names have no start time."""
    with namespace() as ours:
        older = NAMESPACES / f"kpt-{os.getpid()}-0-of-a-test"
        older.touch()
        try:
            sweep()
            assert older.exists()
            assert ours.run("ip", "link")
        finally:
            older.unlink()


def test_a_process_id_that_another_process_has_now_is_no_owner() -> None:
    pid, _, started = owner().partition("-")
    assert is_alive(owner())
    assert not is_alive(f"{pid}-{int(started) + 1}")

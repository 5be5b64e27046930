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
import contextlib, os, signal, subprocess, sys, tempfile
from pathlib import Path
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.processes import own_name, owner
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
                                  f"Path('{NAMESPACES}', f'{{own_name(\"net\")}}-0').touch()",
    "a namespace": "Namespace('web')",
    "a cgroup": "held = new_cgroup()\nheld.__enter__()",
    "a cgroup of the node": "NodeCgroup()",
    "a BPF file system": "held = new_bpf_file_system(Path(sys.argv[1], 'bpf'))\nheld.__enter__()",
    "a process": "subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL, start_new_session=True)",
    "a process in a namespace": "where = Namespace()\nwith where.entered(): subprocess.Popen(\n"
                                "    ['sleep', '1000'], stdout=subprocess.DEVNULL, start_new_session=True)",
    "a directory": "tempfile.mkdtemp(prefix=f'{own_name(\"guests\")}-')",
    # Each as its own program makes it.
    "a bench's namespace": "from tests.bench import __main__ as bench\nbench.json.dump = die\n"
                           "bench.run_in_namespace({'number': 0, 'dir': sys.argv[1]})",
    "a bench's cgroup": "from tests.bench.sockets import _home\nheld = _home()\nheld.__enter__()",
    "a soak's cgroup": "from tests.soak import __main__ as soak\nsoak._check_that_nobody_translates = print\n"
                       "held = soak._own_cgroup()\nheld.__enter__()",
    "faults' directory": "from tests.faults import __main__ as faults\nfaults.Scratch = die\nfaults.main([])",
    "the kit's directories": "import pytest\nfrom kproxy_conformance.suite import stage\n"
                             "stage.Stage._play = die\n"
                             "Path(sys.argv[1], 'pytest.ini').write_text('[pytest]')\n"
                             "pytest.main(['-qpno:cacheprovider', '--kproxy-mode=nftables', '-khairpin',\n"
                             "             '--rootdir', sys.argv[1], sys.argv[1]])",
    "the player's directory": "from kproxy_conformance import __main__ as player\nplayer._play = die\n"
                              "sys.argv[1:] = ['--mode=nftables', '--scenario=hairpin']\nplayer.main()",
    "the demo's directory": "from examples.demo import rootless\nrootless.Proxy = die\n"
                            "rootless.demo('')",
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
    made_by = done.stdout.splitlines()[0]
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
        older = NAMESPACES / f"kb-{os.getpid()}-0"
        older.touch()
        try:
            sweep()
            assert older.exists()
            assert ours.run("ip", "link")
        finally:
            older.unlink()


def test_what_a_run_in_a_container_uses_is_kept(tmp_path: Path) -> None:
    """There, process ids count from 1. Once its processes have ended, its directories are swept."""
    inside = (f"{BEGIN}started = subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL)\n"
              "print(tempfile.mkdtemp(prefix=own_name('guests') + '-'), flush=True)\n"
              "sys.stdin.read()\nprint(started.poll())\nos._exit(0)")
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", inside]
    with subprocess.Popen(container, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "TMPDIR": "/tmp"}) as running:  # fmt: skip
        assert running.stdout
        running.stdout.readline()
        directory = Path(running.stdout.readline().strip())
        sweep()
        assert directory.is_dir()
        assert running.communicate("")[0] == "None\n"
    sweep()
    assert not directory.exists()


@pytest.mark.parametrize("name", [
    "kproxy-lanes-1-1", "kproxy-bench-2026-11", "kproxy-of-1-1", "my-kproxy-bench-of-1-1",
])  # fmt: skip
def test_what_looks_like_a_run_is_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / name).mkdir()
    sweep()
    assert (tmp_path / name).exists()


def test_evidence_and_the_directories_of_other_users_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = {what: tmp_path / f"kproxy-scenarios-of-1-1-{what}"
             for what in ("left", "evidence", "theirs", "link")}
    for what, path in names.items():
        path.symlink_to(CHECKOUT) if what == "link" else path.mkdir()
    (names["evidence"] / "hairpin-nftables-ipv4.state").touch()
    os.chown(names["theirs"], 65534, 65534)
    sweep()
    assert {what for what, path in names.items() if path.exists()} == {"evidence", "theirs", "link"}


def test_a_process_id_that_another_process_has_now_is_no_owner() -> None:
    pid, _, started = owner().partition("-")
    assert is_alive(owner())
    assert not is_alive(f"{pid}-{int(started) + 1}")

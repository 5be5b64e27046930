"""Programs that succeed, fail, hang or do not exist."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kproxy_core.linux import programs
from kproxy_core.linux.programs import OwnProcesses, ProgramFailed, ProgramUnfinished


def test_a_program_reads_its_input_and_its_output_is_returned() -> None:
    assert programs.output("cat", stdin="some\nlines\n") == "some\nlines\n"
    assert list(programs.lines("printf", "some\nlines\n")) == ["some\n", "lines\n"]


def test_a_failure_is_one_line_with_the_programs_message() -> None:
    argv = ("sh", "-c", "echo gone; echo 'not\n  today' >&2; exit 3")
    assert programs.run(*argv).returncode == 3
    with pytest.raises(ProgramFailed, match=r"^sh: exit 3: not today$"):
        programs.output(*argv)
    with pytest.raises(ProgramFailed, match=r"^sh: exit 3: not today$"):
        list(programs.lines(*argv))


def test_a_missing_program_is_named() -> None:
    with pytest.raises(ProgramFailed, match="cannot start no-such-program: No such file or directory"):
        programs.run("no-such-program")


def test_programs_for_root_are_found_with_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert programs.find("nft") == "/usr/sbin/nft"
    assert programs.find("no-such-program") is None


def test_a_program_that_hangs_is_killed() -> None:
    own = OwnProcesses()
    with pytest.raises(ProgramUnfinished, match="sleep timed out after"):
        programs.run("sleep", "1000", own=own, timeout=0.05)
    (pid,) = own._ids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_program_that_is_killed_has_no_result() -> None:
    argv = ("sh", "-c", "echo one; kill -9 $$")
    with pytest.raises(ProgramUnfinished, match=r"^sh: killed, perhaps for lack of memory"):
        programs.output(*argv)
    with pytest.raises(ProgramUnfinished, match=r"^sh: killed, perhaps for lack of memory"):
        list(programs.lines(*argv))


def test_a_program_that_crashes_is_named_with_the_signal() -> None:
    with pytest.raises(ProgramUnfinished, match=r"^sh: ended by signal 11 \(Segmentation fault\)$"):
        programs.output("sh", "-c", "kill -SEGV $$")


def test_closing_the_lines_kills_the_program() -> None:
    own = OwnProcesses()
    found = programs.lines("yes", own=own)
    assert next(found) == "y\n"
    found.close()
    (pid,) = own._ids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_each_owner_remembers_its_own_processes() -> None:
    mine, yours = OwnProcesses(), OwnProcesses()
    pid = int(programs.run("sh", "-c", "echo $$", own=mine).stdout)
    assert pid in mine
    assert pid not in yours
    assert list(programs.lines("true", own=yours)) == []
    assert len(yours._ids) == 1


def test_a_process_is_forgotten_before_another_one_gets_its_id() -> None:
    now = 1000.0
    own = OwnProcesses(lambda: now)
    with own.starting():
        own.remember(4711)
    now += programs.TIMEOUT + 100
    assert 4711 in own
    now += 3600
    assert 4711 not in own


def test_a_program_that_stops_in_the_middle_of_its_output_is_killed() -> None:
    with pytest.raises(ProgramUnfinished, match="sh timed out after"):
        list(programs.lines("sh", "-c", "echo one; exec sleep 1000", timeout=0.05))


def test_the_end_of_the_process_kills_programs_now_and_later() -> None:
    program = (
        "import threading\nfrom kproxy_core.linux import programs\n"
        "threading.Timer(0.2, programs.interrupt).start()\n"
        "print(programs.run('sleep', '1000').returncode, programs.run('sleep', '1000').returncode)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "-9 -9\n"

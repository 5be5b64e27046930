"""Programs that are run, fail, hang or are not there."""

import os
from pathlib import Path

import pytest

from kproxy_core.host import programs
from kproxy_core.host.programs import OwnProcesses, ProgramFailed


def test_a_program_is_given_its_input_and_says_what_it_has_to() -> None:
    assert programs.output("cat", stdin="some\nlines\n") == "some\nlines\n"
    assert list(programs.lines("printf", "some\nlines\n")) == ["some\n", "lines\n"]


def test_a_failure_is_told_in_one_line_with_the_programs_words() -> None:
    argv = ("sh", "-c", "echo gone; echo 'not\n  today' >&2; exit 3")
    assert programs.run(*argv).returncode == 3
    with pytest.raises(ProgramFailed, match=r"^sh: exit 3: not today$"):
        programs.output(*argv)
    with pytest.raises(ProgramFailed, match=r"^sh: exit 3: not today$"):
        list(programs.lines(*argv))


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ProgramFailed, match="no-such-program can't be started: No such file or directory"):
        programs.run("no-such-program")


def test_programs_for_root_are_found_with_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_PATH", os.pathsep.join([str(tmp_path), "/usr/sbin"]))
    assert programs.find("nft") == "/usr/sbin/nft"
    assert programs.find("no-such-program") is None


def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "LONGEST_RUN", 0.05)
    own = OwnProcesses()
    with pytest.raises(ProgramFailed, match="sleep has not ended after"):
        programs.run("sleep", "1000", own=own)
    (pid,) = own._ids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_reader_that_has_seen_enough_ends_the_program() -> None:
    own = OwnProcesses()
    found = programs.lines("yes", own=own)
    assert next(found) == "y\n"
    found.close()
    (pid,) = own._ids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_processes_are_remembered_by_whom_they_belong_to() -> None:
    mine, yours = OwnProcesses(), OwnProcesses()
    pid = int(programs.run("sh", "-c", "echo $$", own=mine).stdout)
    assert pid in mine
    assert pid not in yours
    assert list(programs.lines("true", own=yours)) == []
    assert len(yours._ids) == 1

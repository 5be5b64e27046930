"""The memory of a mode switch across a restart."""

import os
from pathlib import Path

import pytest

from kproxy_core.modes.journal import Entry, Journal, JournalFailed, Phase, Reason

ENTRY = Entry("a", "a", "b", Phase.SERVING)
MODES = ("iptables", "ipvs", "nftables")


@pytest.mark.parametrize(("entry", "configured", "mode"), [
    (None, "iptables", ""),
    (Entry("iptables", "iptables", "nftables", Phase.TRYING), "iptables", ""),
    (Entry("iptables", "iptables", "nftables", Phase.SERVING), "iptables", "nftables"),
    (Entry("iptables", "iptables", "nftables", Phase.SERVING), "ipvs", ""),
    (Entry("iptables", "iptables", "nftables", Phase.SERVING), "", ""),
    (Entry("", "iptables", "nftables", Phase.SERVING), "", "nftables"),
    (Entry("iptables", "ipvs", "nftables", Phase.TRYING), "iptables", "ipvs"),
    (Entry("iptables", "iptables", "uninstalled", Phase.SERVING), "iptables", ""),
], ids=str)  # fmt: skip
def test_the_next_start_finishes_or_rolls_back(
    tmp_path: Path, entry: Entry | None, configured: str, mode: str
) -> None:
    journal = Journal(str(tmp_path / "not-there-yet"))
    if entry is not None:
        journal.write(entry)
    again = Journal(str(tmp_path / "not-there-yet"))
    assert again.read() == entry
    assert again.starting_mode(configured, MODES) == mode


@pytest.mark.parametrize(("entry", "serving", "before", "kept"), [
    (None, "iptables", "", False),
    (Entry("iptables", "iptables", "nftables", Phase.SERVING), "nftables", "iptables", False),
    (Entry("iptables", "nftables", "nftables", Phase.SERVING), "nftables", "", False),
    (Entry("iptables", "nftables", "iptables", Phase.SERVING), "iptables", "nftables", True),
    (Entry("iptables", "iptables", "nftables", Phase.TRYING), "iptables", "", False),
    (Entry("iptables", "ipvs", "nftables", Phase.TRYING), "ipvs", "", False),
    (Entry("ipvs", "nftables", "iptables", Phase.SERVING), "iptables", "", False),
    (Entry("iptables", "iptables", "nftables", Phase.SERVING), "ipvs", "", False),
], ids=str)  # fmt: skip
def test_the_mode_before_is_known_while_the_other_serves(
    tmp_path: Path, entry: Entry | None, serving: str, before: str, kept: bool
) -> None:
    journal = Journal(str(tmp_path))
    if entry is not None:
        journal.write(entry)
    assert journal.mode_before("iptables", serving) == before
    journal.clear_unless_switched_to("iptables")
    assert journal.read() == (entry if kept else None)


@pytest.mark.parametrize(("reason", "by_label", "mode"), [
    (Reason.LABEL, True, "nftables"), (Reason.LABEL, False, ""), (Reason.SWITCH, False, "nftables"),
])
def test_a_mode_named_by_a_label_is_for_a_configuration_that_follows_labels(
    tmp_path: Path, reason: Reason, by_label: bool, mode: str
) -> None:
    journal = Journal(str(tmp_path))
    journal.write(Entry("iptables", "iptables", "nftables", Phase.SERVING, reason))
    assert journal.starting_mode("iptables", MODES, by_label=by_label) == mode


def test_an_entry_of_an_earlier_release_is_of_a_switch(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.write(ENTRY)
    (written,) = tmp_path.iterdir()
    written.write_text('{"configured":"a","before":"a","after":"b","phase":"serving"}')
    assert journal.read() == ENTRY


@pytest.mark.parametrize("content", [
    "", "{", "[]", '{"phase": "never heard of"}', "\N{SNOWMAN}", "[" * 4000, '{"a":' * 800, " " * 100_000_000,
], ids=lambda content: repr(content[:10]))  # fmt: skip
def test_an_unusable_file_is_ignored_and_logged_once(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(str(tmp_path))
    journal.write(Entry("a", "a", "b", Phase.SERVING))
    (written,) = tmp_path.iterdir()
    written.write_text(content)
    assert journal.starting_mode("a", ("a", "b")) == ""
    assert caplog.text.count("ignoring unusable journal") == 1


def test_a_link_or_a_pipe_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(str(tmp_path))
    journal.write(ENTRY)
    (written,) = tmp_path.iterdir()
    for make in ("link", "pipe"):
        written.rename(tmp_path / "elsewhere")
        if make == "link":
            written.symlink_to(tmp_path / "elsewhere")
        else:
            os.mkfifo(written)
        assert journal.read() is None
        assert "ignoring unusable journal" in caplog.text
        caplog.clear()
        journal.write(ENTRY)
        assert journal.read() == ENTRY
        assert written.is_file()


def test_a_link_in_place_of_the_new_file_is_replaced(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "state"))
    journal.write(ENTRY)
    (written,) = (tmp_path / "state").iterdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    written.with_suffix(".new").symlink_to(victim)
    journal.write(ENTRY)
    assert victim.read_text() == "precious"
    assert journal.read() == ENTRY


def test_a_directory_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalFailed, match=r"cannot write .*file/.*kproxy\.stateDirectory"):
        Journal(str(tmp_path / "file")).write(Entry("a", "a", "b", Phase.TRYING))

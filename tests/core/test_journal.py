"""What is remembered of a switch of modes over a restart."""

from pathlib import Path

import pytest

from kproxy_core.modes.journal import Entry, Journal, JournalFailed, Phase

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
    assert again.mode_to_start(configured, MODES) == mode
    if not mode:
        assert again.read() is None, "what does not count any more is gone"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"phase": "never heard of"}', "\N{SNOWMAN}"])
def test_a_file_that_makes_no_sense_counts_as_none(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(str(tmp_path))
    journal.write(Entry("a", "a", "b", Phase.SERVING))
    (written,) = tmp_path.iterdir()
    written.write_text(content)
    assert journal.mode_to_start("a", ("a", "b")) == ""
    assert "can't be used" in caplog.text


def test_a_directory_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalFailed, match=r"file/.* can't be written .*kproxy\.stateDirectory"):
        Journal(str(tmp_path / "file")).write(Entry("a", "a", "b", Phase.TRYING))

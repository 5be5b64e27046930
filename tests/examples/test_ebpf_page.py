"""Every command of docs/ebpf.md runs, in the order of the page, and shows what the page says."""

from pathlib import Path

from tests.examples.pages import CHECKOUT, outputs_of

PAGE = CHECKOUT / "docs" / "ebpf.md"


def test_every_command_runs(tmp_path: Path) -> None:
    probe, _, programs, explanation, elements, metric, switch, cleanup = outputs_of(PAGE, tmp_path)
    assert "ebpf" in probe
    assert programs.count("kproxy_") == 8
    assert "BPF map frontends" in explanation
    assert "0a 60 00 0a" in elements  # 10.96.0.10
    assert metric == "kproxy_ebpf_attached 1\n"
    assert "nftables serves" in switch
    assert "maps-" in cleanup

"""The scenario in CONTRIBUTING.md passes, and the command there writes packets."""

import shlex
import subprocess
import sys
from pathlib import Path

from tests.examples.pages import CHECKOUT

PAGE = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def play(*arguments: str) -> str:
    command = [sys.executable, "-m", "kproxy_conformance", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_new_scenario_passes(tmp_path: Path) -> None:
    (tmp_path / "gone.yaml").write_text(PAGE.partition("```yaml\n")[2].partition("```")[0])
    assert "2 passed, 0 failed, 0 skipped" in play("--driver=backend", "--mode=nftables", f"--dir={tmp_path}")


def test_the_command_for_one_scenario_writes_its_packets(tmp_path: Path) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.strip().endswith(" --packets /tmp/hairpin.pcap")]
    *arguments, _ = shlex.split(line.partition(" -m kproxy_conformance ")[2])
    packets = tmp_path / "hairpin.pcap"
    assert "2 passed" in play(*arguments, str(packets))
    assert packets.stat().st_size > 10_000

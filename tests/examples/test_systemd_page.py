"""Every command of docs/systemd.md that needs no running systemd runs, and its drop-ins are accepted."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.core.processes import kproxy
from tests.examples.pages import CHECKOUT, printed_by

PAGE = CHECKOUT / "docs" / "systemd.md"
DROP_INS = re.findall(r"^```ini\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
NEEDED = ("CAP_NET_(BIND_SERVICE|BROADCAST|RAW)", "CAP_BPF")


def test_the_unit_is_printed_and_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SYSTEMD_COLORS", "SYSTEMD_URLIFY"):
        monkeypatch.setenv(name, "0")
    printed = printed_by(PAGE, tmp_path)
    assert "\nType=notify\n" in printed
    assert re.search(r"Overall exposure level for kproxy.service: [12]\.\d OK", printed)


@pytest.mark.parametrize(("drop_in", "capability"), [*zip(DROP_INS, NEEDED, strict=True)], ids=NEEDED)
def test_each_drop_in_adds_its_capability_to_those_of_the_unit(
    tmp_path: Path, drop_in: str, capability: str
) -> None:
    file = tmp_path / "kproxy.service"
    file.write_text(kproxy("unit").stdout)
    assert not admitted(file, capability)
    added = tmp_path / "kproxy.service.d" / "override.conf"
    added.parent.mkdir()
    added.write_text(drop_in)
    assert admitted(file, capability)
    assert admitted(file, "CAP_NET_ADMIN")


def admitted(file: Path, capability: str) -> bool:
    """Return whether systemd finds that the service of the unit in *file* may have *capability*."""
    command = ["systemd-analyze", "security", "--offline=true", "--json=short", str(file)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    name = f"CapabilityBoundingSet=~{capability}"
    (exposure,) = [check["exposure"] for check in found if check["name"] == name]
    return exposure is not None

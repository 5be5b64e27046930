"""The example backends, as readers install and test them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from kproxy_conformance.suite.scenario import find
from kproxy_core.model.address import Family
from tests.kit.conftest import EXAMPLE


def left_out() -> list[str]:
    """Return the options that leave each scenario out in one family, in both in turns."""
    in_both = sorted(each.name for each in find() if len(each.families) == len(Family))
    return [
        f"--deselect=::kproxy-plain::scenarios::{name}[{family.label}]"
        for number, name in enumerate(in_both)
        for family in [tuple(Family)[number % len(Family)]]
    ]


def test_example_is_installed_and_passes_its_own_tests(tmp_path: Path) -> None:
    """As its README says: pip install, pytest. Each scenario is played in one family: it takes long."""
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    subprocess.run(["cp", "-r", EXAMPLE, checkout], check=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", site, checkout], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *left_out()],
        cwd=checkout, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "kproxy-conformance of mode plain" in done.stdout
    not_kept = "not applicable: the backend announces: session affinity is not kept"
    assert re.search(rf"scenarios::affinity-client-ip\[IPv.\]: {not_kept}", done.stdout)


def test_backend_for_nf_tables_keeps_the_contract_and_forwards(tmp_path: Path) -> None:
    """By the command of the page, in IPv4, where it is quicker."""
    page = (EXAMPLE.parents[1] / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
    source = page.partition("runs this block as kproxy_maps.py -->\n```python\n")[2].partition("```")[0]
    (tmp_path / "kproxy_maps.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (command,) = re.findall(r"^pytest --kproxy-plugin=kproxy_maps .*", page, re.MULTILINE)
    _, *arguments, selected = shlex.split(command)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *arguments,
         f"({selected}) and not IPv6"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "45 passed, 0 failed" in done.stdout


def test_backend_of_the_page_keeps_the_contract(tmp_path: Path) -> None:
    """In IPv4; nothing forwards packets there."""
    page = (EXAMPLE.parents[1] / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
    source = page.partition("runs this block as kproxy_textfile.py -->\n```python\n")[2].partition("```")[0]
    (tmp_path / "kproxy_textfile.py").write_text(source)
    kept = tmp_path / "kept"
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\nkproxy_state = cat {kept}/*.txt 2>/dev/null\nkproxy_damage = rm -f {kept}/*.txt\n"
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "--rootdir=.",
            "--kproxy-mode=textfile", "--kproxy-plugin=kproxy_textfile", "-k", "contract and not IPv6",
        ],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ".", "TEXTFILE_DIRECTORY": str(kept)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "0 failed" in done.stdout

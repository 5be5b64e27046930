"""The commands of docs/writing-a-backend.md, in its order and in the directories that it names.

The environment is there already. The kit runs in `tests.kit.test_an_installed_example`, and the observers in
`tests.core.contract.test_observer_example`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.examples.pages import CHECKOUT

PAGE = (CHECKOUT / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
_LONGEST = 120
"""Seconds."""


def block(mark: str) -> str:
    return PAGE.partition(f"{mark} -->\n```python\n")[2].partition("```")[0]


def command(start: str) -> str:
    found: str
    (found,) = (each for each in COMMANDS if each.startswith(start))
    return found


def run(script: str, directory: Path) -> str:
    """Return what *script* prints, in namespaces and with a /run of its own."""
    binaries = Path(sys.executable).parent
    sandbox = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*sandbox, "bash", "-euc", f"mount -t tmpfs none /run\n{script}"],
        cwd=directory, timeout=_LONGEST, check=False,
        env={**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": "site"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_backend_from_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PAGE.partition("```toml\n")[2].partition("```")[0])
    backend = block("runs this block as kproxy_textfile.py")
    method = block("appends this block to kproxy_textfile.py")
    (tmp_path / "kproxy_textfile.py").write_text(f"{backend}\n{method}")
    install = "pip install --no-deps --editable .\n"
    tried = command(install).replace(
        install, "pip install -q --no-deps --no-index --no-build-isolation --target site .\n")
    printed = run(tried, tmp_path)
    assert re.search(r"^textfile +usable", printed, re.MULTILINE)
    assert printed.rstrip().endswith(re.findall(r"--manifests \.   # (.+)", tried)[0])
    served = run(f"""
{command("unshare --net sh -c").strip()} &
until test -s /run/kproxy-textfile/IPv4.txt; do sleep 0.1; done
kill -INT $!
wait $! || true
cat /run/kproxy-textfile/IPv4.txt
unshare --net kproxy --cleanup --dry-run
unshare --net kproxy --cleanup
""", tmp_path)
    assert "10.96.0.10 TCP 80 -> 10.1.0.5:8080\n" in served
    for line in ("IPv4.txt would be removed", "IPv4.txt removed", "IPv6.txt removed"):
        assert f"textfile: file /run/kproxy-textfile/{line}\n" in served


def test_a_backend_for_nf_tables_without_an_installation(tmp_path: Path) -> None:
    (tmp_path / "kproxy_maps.py").write_text(block("runs this block as kproxy_maps.py"))
    printed = run(command("export PYTHONPATH=.\n").partition("pytest ")[0], tmp_path)
    assert re.search(r"^maps +usable", printed, re.MULTILINE)

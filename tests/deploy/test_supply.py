"""The image installs what `pyproject.toml` asks for, with all extras and with hashes, and lacks nothing."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import kubernetes
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.objects import DEPLOY

PINNED = re.compile(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def test_every_requirement_is_pinned_with_hashes() -> None:
    text = (DEPLOY / "requirements.txt").read_text()
    pins = {canonicalize_name(found[1]): found[2] for found in PINNED.finditer(text)}
    assert len(pins) == text.count("=="), "a line without a hash"
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in project["dependencies"] + extras["api"] + extras["ipvs"] + extras["top"]:
        requirement = Requirement(line)
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{line}: {version}; make requirements"


def test_the_tests_that_the_security_page_names_exist() -> None:
    checkout = DEPLOY.parent
    path = ""
    for word in re.findall(r"`(tests/[\w/.]*(?:::\w+)?|::\w+)`", (checkout / "SECURITY.md").read_text()):
        file, _, test = word.partition("::")
        path = file or path
        assert (checkout / path).exists(), path
        assert not test or f"def {test}(" in (checkout / path).read_text(), word


def test_the_pages_and_the_metadata_promise_the_same() -> None:
    checkout = DEPLOY.parent
    support, readme = ((checkout / name).read_text() for name in ("SUPPORT.md", "README.md"))
    classifiers = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["classifiers"]
    (status,) = re.findall(r"^Development Status :: \d - (.*)$", "\n".join(classifiers), re.MULTILINE)
    for page in (support, readme):
        assert f"**Status: {status.lower()}.**" in page
    pythons = re.findall(r"^.* :: Python :: (\d\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    assert f"| Python | {', '.join(pythons)} |" in support
    chart = yaml.safe_load((DEPLOY / "chart" / "Chart.yaml").read_text())
    oldest = re.fullmatch(r">=(\d\.\d+)\.0-0", chart["kubeVersion"])
    assert oldest is not None
    assert f"| {oldest[1]} and newer" in support


def containerfile() -> str:
    """Return its text, with one line for each instruction."""
    return (DEPLOY / "Containerfile").read_text().replace("\\\n", "")


def test_the_image_installs_nothing_else() -> None:
    text = containerfile()
    first, second = re.findall(r"bin/pip install (.*?)(?: && |\n)", text)
    assert "--require-hashes --only-binary :all: --requirement /src/deploy/requirements.txt" in first
    assert second.split()[-3:] == ["--no-deps", "--no-build-isolation", "/src"]


def stages() -> dict[str, tuple[str, list[str]]]:
    """Return the stages by name, "" for the last: the image each begins with, and its other instructions."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in containerfile().splitlines():
        if line.startswith("FROM "):
            _, image, *name = line.split()
            instructions: list[str] = []
            found[name[-1] if name else ""] = image, instructions
        elif line and not line.startswith("#"):
            instructions.append(line)
    return found


def test_only_the_image_for_ebpf_has_bcc_and_none_has_pip() -> None:
    found = stages()
    assert found[""] == ("kproxy", [])
    assert found["ebpf"][0] == "kproxy"
    for name, (_, instructions) in found.items():
        assert any("bpfcc" in line for line in instructions) == (name == "ebpf")
        assert any("python3-venv" in line for line in instructions) == (name == "build")
    assert found["build"][1][-1].endswith("pip uninstall -qq -y pip setuptools")


def test_the_image_says_what_it_is() -> None:
    label = next(line for line in stages()["kproxy"][1] if line.startswith("LABEL "))
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="(.*?)"', label))
    assert labels["version"] == "$VERSION"
    assert labels["revision"] == "$COMMIT"
    assert labels["base.name"] == stages()["kproxy"][0]


def left_out() -> list[str]:
    """Return the modules of installed packages that the image does not have."""
    text = containerfile()
    site = Path(kubernetes.__file__).parents[1]
    removed = re.findall(r"&& rm -r (kubernetes/\S+) +&&", text)
    (emptied,) = re.findall(r"&& find (kubernetes.*?) -name '\*\.py' ! -name __init__\.py -delete", text)
    for directory in emptied.split():
        found = [path for path in (site / directory).glob("*.py") if path.name != "__init__.py"]
        assert found
        removed += [str(path.relative_to(site).with_suffix("")) for path in found]
    names = re.findall(r"pip uninstall -qq -y (.*?) +&&", text)[0].split()
    uninstalled = set(map(canonicalize_name, names))
    asked_for = {canonicalize_name(Requirement(line).name) for line in requires("kproxy") or ()}
    assert not uninstalled & asked_for
    modules = [
        module for module, names in packages_distributions().items()
        if uninstalled & {canonicalize_name(name) for name in names}]
    assert len(modules) >= len(uninstalled), "a package that is not installed here"
    return [*(path.replace("/", ".") for path in removed), *modules]


WITHOUT = "import sys\nfor name in sys.argv.pop(1).split(','): sys.modules[name] = None\n"


@pytest.mark.parametrize("user", [
    {"token": "t"}, {"username": "me", "password": "pw"},
    {"auth-provider": {"name": "gcp", "config": {"access-token": "t"}}},
], ids=lambda user: next(iter(user)))  # fmt: skip
@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:9"], ids=["direct", "proxy"])
def test_credentials_are_loaded_without_what_the_image_leaves_out(
    tmp_path: Path, user: dict[str, object], proxy: str
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump({
        "clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.1"}}], "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": user}],
    }))
    program = f"{WITHOUT}from kproxy_core.kube.loader import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", program, ",".join(left_out()), "", path, ""], capture_output=True, text=True,
        check=True, env=os.environ | {"HTTPS_PROXY": proxy, "NO_PROXY": "", "no_proxy": ""})  # fmt: skip
    loaded = json.loads(done.stdout)
    ((name, value),) = loaded["headers"]
    assert (name, value.split()[0]) == ("Authorization", "Basic" if "username" in user else "Bearer")
    assert loaded.get("proxy", "") == proxy


def test_kubectl_kproxy_starts_without_what_the_image_leaves_out() -> None:
    program = f"{WITHOUT}import kproxy_core.fleet.cluster\nfrom kproxy_core.cli.kubectl import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, ",".join(left_out()), "--help"], capture_output=True, text=True,
        check=True)  # fmt: skip
    assert "Usage:" in done.stdout


def test_tables_are_shown_without_what_the_image_leaves_out() -> None:
    program = (f"{WITHOUT}import rich.live\nfrom rich.console import Console\nfrom rich.table import Table\n"
               "Console().print(Table('shown'))")
    done = subprocess.run(
        [sys.executable, "-c", program, ",".join(left_out())], capture_output=True, text=True, check=True)
    assert "shown" in done.stdout

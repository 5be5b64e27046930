"""What speaks against a release, and what operators read about it. tests/install makes one."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy import artefacts, evidence, release
from deploy.artefacts import BuildError
from deploy.release import fields, notes, of_fields, of_key, of_surface, of_version
from tests.deploy import schema
from tests.deploy.objects import helm
from tests.rooms.surface import Tree
from tests.rooms.test_surface import FILES, RUN, VALUES

SCHEMA: dict[str, Any] = {"properties": {
    "mode": {"type": "string"}, "kproxy": {"properties": {"weights": {"type": "boolean"}}}}}


@pytest.mark.parametrize(("asked", "sources", "earlier", "words"), [
    ("1.0.0", "1.0.0.dev0", ["0.2.0"], ""),
    ("1.2.10", "1.2.10.dev0", ["1.2.9", "1.2.0"], ""),
    ("1.0", "1.0.0.dev0", [], "'1.0' is not three numbers: as in VERSION=1.0.0"),
    ("v1.0.0", "1.0.0.dev0", [], "'v1.0.0' is not three numbers"),
    ("1.0.01", "1.0.0.dev0", [], "'1.0.01' is not three numbers"),
    ("", "1.0.0.dev0", [], "'' is not three numbers"),
    ("1.1.0", "1.0.0.dev0", ["0.2.0"], "becomes 1.0.0, not 1.1.0: give VERSION=1.0.0, or set SOURCES"),
    ("0.2.0", "1.0.0.dev0", ["0.2.0"], "0.2.0 was released before: set SOURCES"),
    ("1.0.0", "1.0.0", [], "this commit is the release 1.0.0: release from the commit after it"),
    ("1.9.0", "1.9.0.dev0", ["1.10.0", "1.8.0"], "1.9.0 is before 1.10.0, which was released: set SOURCES"),
])  # fmt: skip
def test_the_version_is_the_next_one(asked: str, sources: str, earlier: list[str], words: str) -> None:
    found = [f"{each.what}: {each.remedy}" for each in of_version(asked, sources, earlier)]
    assert len(found) == bool(words)
    assert words in "".join(found)


def with_changes(*changed: tuple[str, str, str]) -> Tree:
    files = dict(FILES)
    for path, old, new in changed:
        assert old in files[path]
        files[path] = files[path].replace(old, new)
    return Tree(files.get)


ADDED = (VALUES, "number: int = 0", "number: int = 0\n    more: str = ''")
REMOVED = (RUN, "program: str", "command: str")


@pytest.mark.parametrize(("changed", "contract", "text", "words"), [
    ((), (1, 2), "", []),
    ([ADDED], (1, 3), "`Answer` has `more`.", []),
    ([ADDED], (1, 3), "Answers are better.", ["no entry names Answer: name each"]),
    ([ADDED], (1, 2), "`Answer` has `more`.", ["needs contract 1.3: raise CONTRACT"]),
    ([REMOVED], (1, 3), "`run` has changed.", ["need contract 2.0; it is 1.3: raise CONTRACT"]),
    ([REMOVED], (2, 0), "Contract 2.0: `run` has changed.", []),
    ([REMOVED], (2, 0), "`run` has changed.", ["the entries do not name contract 2.0: say in changelog.d"]),
])  # fmt: skip
def test_changes_for_plugins_have_a_number_and_an_entry(
    changed: list[tuple[str, str, str]], contract: tuple[int, int], text: str, words: list[str]
) -> None:
    new = with_changes(*changed, (VALUES, "(1, 2)", str(contract)))
    found = [f"{each.what}: {each.remedy}" for each in of_surface(Tree(FILES.get), new, text)]
    assert len(found) == len(words), found
    assert all(word in text for word, text in zip(words, found, strict=True)), found


@pytest.mark.parametrize(("new", "text", "unnamed"), [
    (SCHEMA, "", ""),
    ({"properties": {**SCHEMA["properties"], "mode": {"type": "integer"}}}, "", "mode"),
    ({"properties": {"mode": {"type": "string"}}}, "Modes.", "kproxy.weights"),
    ({"properties": {"mode": {"type": "string"}}}, "`kproxy.weights` has ended.", ""),
    ({"properties": {**SCHEMA["properties"], "udp": {"properties": {"idle": {}}}}}, "UDP.", "udp.idle"),
], ids=["nothing", "another type", "removed", "removed and named", "added"])  # fmt: skip
def test_changed_fields_of_the_configuration_are_named(new: dict[str, Any], text: str, unnamed: str) -> None:
    found = [each.what for each in of_fields(SCHEMA, new, text)]
    assert found == ([f"the configuration has changed, and no entry names {unnamed}"] if unnamed else [])


def test_a_release_without_a_schema_is_compared_with_nothing() -> None:
    assert not list(of_fields({}, SCHEMA, ""))


def test_the_schema_of_the_chart_has_the_fields_of_the_configuration() -> None:
    source = {"deploy/chart/values.schema.json": schema.FILE.read_text()}.get
    found = dict(fields(release._configuration(source)))
    assert {"mode", "conntrack.maxPerCore", "kproxy.ownTables"} <= set(found)


def key(directory: Path, name: str) -> Path:
    """Make a key to sign with."""
    made = directory / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", made], check=True)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "deploy").mkdir()
    (tmp_path / evidence.SIGNERS).write_text("# Keys.\n")
    return tmp_path


def test_a_key_that_nobody_can_check_is_named_with_its_line(root: Path) -> None:
    (unknown,) = of_key(root, made := key(root, "key"))
    assert unknown.what == f"{made} is no key that signs releases"
    (root / evidence.SIGNERS).write_text(unknown.remedy.rpartition(": ")[2])
    assert not list(of_key(root, made))
    assert not list(of_key(root, made.with_suffix(".pub")))
    (none,) = of_key(root, root)
    assert none.what == "no key is given"
    (absent,) = of_key(root, root / "other")
    assert absent.what == f"{root / 'other'}.pub does not exist"


def test_the_check_notices_another_file_another_sum_and_another_key(root: Path) -> None:
    ours, other = key(root, "key"), key(root, "other")
    (root / evidence.SIGNERS).write_text(evidence.signer(ours))
    files = root / "files"
    files.mkdir()
    (files / "a").write_text("a")
    check = evidence.check(str(root / evidence.SIGNERS))
    evidence.sign(root, files, ours)

    def is_good() -> bool:
        done = subprocess.run(["sh", "-c", check], cwd=files, capture_output=True, check=False)
        return done.returncode == 0

    assert is_good()
    (files / "a").write_text("b")
    assert not is_good()
    (files / evidence.SUMS).write_text(f"{evidence.digest(files / 'a')}  a\n")
    assert not is_good()
    for name in ("SHA256SUMS", "SHA256SUMS.sig"):
        (files / name).unlink()
    with pytest.raises(BuildError, match="Could not verify signature"):
        evidence.sign(root, files, other)


def test_the_parts_are_the_pins_with_their_hashes() -> None:
    found = json.loads(json.dumps(evidence.parts(artefacts.CHECKOUT)))
    pins = (artefacts.CHECKOUT / "deploy" / "requirements.txt").read_text()
    assert len(found["components"]) == pins.count("==")
    assert sum(len(each["hashes"]) for each in found["components"]) == pins.count("--hash=")
    (root,) = found["dependencies"]
    assert set(root["dependsOn"]) == {each["bom-ref"] for each in found["components"]}
    assert "pkg:pypi/msgspec@" in json.dumps(root)


def test_operators_read_first_what_to_do() -> None:
    text = notes("1.1.0", {
        "Before the upgrade": "- Stop.\n", "Added": "- A.\n", "Added, off by default": "- B.\n",
        "Removed": "- C.\n",
    }, "No change, contract 1.1")  # fmt: skip
    assert text.startswith("""# kproxy 1.1.0

## What to do before the upgrade

- Stop.

## What changes for you

Removed:

- C.

## The way back

Install the release before, as docs/deploy.md shows.

## For authors of backends

No change, contract 1.1.

## What is new

Added:

- A.

Added, off by default:

- B.

## What works that did not

Nothing.

## Check these files
""")
    assert evidence.check("allowed_signers") in text


@pytest.mark.parametrize(("version", "semantic"), [
    ("1.0.0", "1.0.0"), ("1.0.0.dev7+g0123456789ab", "1.0.0-dev.7+g0123456789ab"),
])  # fmt: skip
def test_the_chart_has_a_semantic_version(version: str, semantic: str) -> None:
    assert artefacts.semantic(version) == semantic


def test_the_packed_chart_names_an_image_that_can_exist(tmp_path: Path) -> None:
    artefacts.chart(artefacts.CHECKOUT, tmp_path)
    (packed,) = tmp_path.iterdir()
    done = helm("template", "kproxy", str(packed))
    assert done.returncode == 0, done.stderr
    version = artefacts.version(artefacts.CHECKOUT)
    tags = set(re.findall(r"image: \"?kproxy:([^\s\"]*)", done.stdout))
    assert tags == {version.replace("+", "-")}
    assert re.fullmatch(r"[\w.-]+", *tags)


def test_images_are_built_with_the_version_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no program builds images, this is all that can be tried: what it is asked for."""
    log, builder = tmp_path / "log", tmp_path / "builder"
    builder.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    builder.chmod(0o755)
    told = {"kproxy_core/config/release.py": "1.0.0.dev7+g0123", "HEAD": "01234567"}
    real = artefacts.run
    monkeypatch.setattr(artefacts, "run", lambda command, root, environment=None: told.get(
        str(command[-1])) or real(command, root, environment))
    artefacts.images(tmp_path, tmp_path, str(builder))
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    arguments = "--build-arg=VERSION=1.0.0.dev7+g0123 --build-arg=COMMIT=01234567"
    assert log.read_text() == "".join(
        f"build --file=deploy/Containerfile --target={target} {arguments} --tag=kproxy:{tag} .\n"
        f"save --output={tmp_path}/kproxy-image-{tag}-{machine}.tar kproxy:{tag}\n"
        for target, tag in (("kproxy", "1.0.0.dev7-g0123"), ("ebpf", "1.0.0.dev7-g0123-ebpf")))

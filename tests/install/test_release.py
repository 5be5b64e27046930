"""A release, made by the command that releasers use: the same bytes twice, and what speaks against it."""

import json
import subprocess
import tarfile
from pathlib import Path

from deploy import evidence
from tests.deploy.objects import helm
from tests.install.packages import VERSION, Release


def test_a_release_is_the_same_bytes_everywhere(released: Release, tmp_path: Path) -> None:
    """In another directory, with other rights and in another time zone."""
    again = released.again(tmp_path, "env", "TZ=Asia/Tokyo", "sh", "-c", 'umask 077; exec "$@"', "sh")
    assert evidence.digests(again.files) == evidence.digests(released.files)
    assert again.printed == released.printed


def test_its_files_are_checked_with_the_documented_line(released: Release) -> None:
    (line,) = (line for line in released.notes.splitlines() if "ssh-keygen" in line)
    assert line.strip() in (released.root / "SECURITY.md").read_text()
    signers = (released.root / evidence.SIGNERS).read_text()
    (released.files.parent / "allowed_signers").write_text(signers)
    command = line.replace("allowed_signers", "../allowed_signers")
    done = subprocess.run(
        ["sh", "-c", command], cwd=released.files, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sums = (released.files / "SHA256SUMS").read_text()
    assert {line.split()[1] for line in sums.splitlines()} == {
        path.name for path in released.files.iterdir() if not path.name.startswith("SHA256SUMS")}


def test_its_files_are_all_of_that_version(released: Release) -> None:
    names = sorted(path.name for path in released.files.iterdir())
    architecture = subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()
    assert names == sorted([
        "SHA256SUMS", "SHA256SUMS.sig", f"kproxy-{VERSION}-notes.md", f"kproxy-{VERSION}-py3-none-any.whl",
        f"kproxy-{VERSION}.cdx.json", f"kproxy-{VERSION}.intoto.json", f"kproxy-{VERSION}.tar.gz",
        f"kproxy-chart-{VERSION}.tgz", f"kproxy_{VERSION}_{architecture}.deb",
        f"kproxy_conformance-{VERSION}-py3-none-any.whl"])
    shown = helm("template", "kproxy", str(released.files / f"kproxy-chart-{VERSION}.tgz")).stdout
    assert f"kproxy:{VERSION}" in shown


def test_the_provenance_names_the_commit_and_every_file(released: Release) -> None:
    statement = json.loads((released.files / f"kproxy-{VERSION}.intoto.json").read_text())
    assert (statement["_type"], statement["predicateType"]) == (
        "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1")
    named = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    found = evidence.digests(released.files)
    without = {"SHA256SUMS", "SHA256SUMS.sig", f"kproxy-{VERSION}.intoto.json"}
    assert named == {name: digest for name, digest in found.items() if name not in without}
    source = statement["predicate"]["buildDefinition"]["resolvedDependencies"][0]
    assert source["digest"]["gitCommit"] == released.git("rev-parse", released.commits[0])


def test_the_commits_are_those_of_the_release_and_of_the_next(released: Release) -> None:
    made, after = released.commits
    assert released.git("rev-parse", f"{after}~1", f"{made}~1").split() == [
        released.git("rev-parse", made), released.git("rev-parse", "HEAD")]
    page = released.git("show", f"{made}:CHANGELOG.md")
    assert f"## {VERSION}\n" in page
    assert "## Unreleased" not in page
    assert released.git("ls-tree", "--name-only", made, "changelog.d/") == ""
    major, minor, _ = VERSION.split(".")
    assert f'SOURCES = "{major}.{int(minor) + 1}.0.dev0"' in released.git(
        "show", f"{after}:kproxy_core/config/release.py")
    changed = released.git("diff", "--name-only", "HEAD", after).splitlines()
    assert {path for path in changed if not path.startswith("changelog.d/")} == {
        "CHANGELOG.md", "kproxy_core/config/release.py"}
    assert f"git tag --sign --message='kproxy {VERSION}' v{VERSION} {made}\n" in released.printed
    with tarfile.open(released.files / f"kproxy-{VERSION}.tar.gz") as archive:
        held = archive.extractfile(f"kproxy-{VERSION}/kproxy_core/VERSION")
        assert held is not None
        assert held.read().decode() == f"{VERSION} {made}\n"


def test_it_changes_neither_branch_nor_tag_nor_checkout(released: Release) -> None:
    assert released.git("for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert released.git("status", "--porcelain") == ""
    assert released.git("worktree", "list").count("\n") == 0


def test_all_that_speaks_against_it_is_named_at_once(released: Release, tmp_path: Path) -> None:
    changed = released.cloned(tmp_path)
    (changed.root / "changelog.d" / "wrong.new.md").write_text("A mistake.\n")
    (changed.root / "README.md").write_text("Another.\n")
    done = changed.make("1.0", "--images=none", key=tmp_path / "no-such-key")
    assert done.returncode == 1
    assert done.stdout == ""
    for words in ("kproxy 1.0 is not released:",
                  "- the version '1.0' is not three numbers\n    as in VERSION=",
                  "- not committed: README.md, changelog.d/wrong.new.md\n    commit or remove it",
                  "- changelog.d/wrong.new.md: name it NAME.KIND.md",
                  " has no tag to compare with\n    SINCE=",
                  f"- {tmp_path}/no-such-key.pub does not exist\n    KEY="):
        assert words in done.stderr
    assert not (changed.root / "dist").exists()


def test_what_changed_since_the_last_release_is_named(released: Release, tmp_path: Path) -> None:
    changed = released.cloned(tmp_path)
    changed.git("tag", "v0.2.0")
    for path, old, new in (
        ("kproxy_core/contract/public.py", '("GAUGES", "Counter")', '("GAUGES",)'),
        ("deploy/chart/values.schema.json", '"conntrack": {', '"conntrackNew": {'),
    ):
        text = (changed.root / path).read_text()
        assert old in text
        (changed.root / path).write_text(text.replace(old, new))
    done = changed.make(VERSION, "--images=none")
    assert done.returncode == 1
    naming = "    name each in changelog.d, as `code`\n"
    for words in ("- what plugins import has changed: 1 incompatible changes need contract",
                  f"- what plugins import has changed, and no entry names Counter\n{naming}",
                  "- the configuration has changed, and no entry names conntrack.",
                  "- the chart's schema is not that of the configuration\n    run python -m"):
        assert words in done.stderr

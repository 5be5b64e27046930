"""Makes a release from this commit: `make release VERSION=1.0.0 KEY=~/.ssh/id_release`.

First it names everything that speaks against the release, with what to do. Then it makes, beside the
checkout, the commit of the release and the next one, and from the first all files, in dist/kproxy-VERSION. It
changes no branch and no tag: its last lines say how to publish. docs/development.md has the whole.
"""

import argparse
import json
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploy import artefacts, changelog, evidence
from deploy.artefacts import CHECKOUT, BuildError, run
from kproxy_core.config.release import SOURCES
from tests.deploy import schema
from tests.rooms import surface
from tests.rooms.surface import Change, Tree

NOTHING = "none"
"""In place of an earlier release, or of a program that builds images."""

PODMAN = "podman"
VERSION_FILE = "kproxy_core/config/release.py"
_SHOWN = 5
"""Limit for the files that are named because they are not committed."""
_IN_DEVELOPMENT: Mapping[str, Mapping[str, str]] = {
    "deploy/base/kustomization.yaml": {"newTag: dev\n": "newTag: {}\n"},
    "deploy/ebpf/kustomization.yaml": {"newTag: dev-ebpf\n": "newTag: {}-ebpf\n"},
    "deploy/chart/Chart.yaml": {
        "version: 0.0.0-dev\n": "version: {}\n", "appVersion: dev\n": "appVersion: {}\n"},
    "docs/deploy.md": {"kproxy:dev": "kproxy:{}"},
    "docs/clusters.md": {"kproxy:dev": "kproxy:{}"},
}
"""What files say between releases, and in the release with that version."""

Schema = Mapping[str, Any]
"""A schema in JSON."""


class Objection(NamedTuple):
    """Something that speaks against a release."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}\n    {self.remedy}"


# Objections.

def of_version(asked: str, sources: str, earlier: Sequence[str]) -> Iterator[Objection]:
    """Object to a version. *sources*: that of the checkout; *earlier*: the releases before."""
    base = sources.removesuffix(".dev0")
    later = f"set SOURCES in {VERSION_FILE} to a later version, and commit"
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", asked):
        yield Objection(f"the version {asked!r} is not three numbers", f"as in VERSION={base}")
    elif asked in earlier:
        yield Objection(f"{asked} was released before", later)
    elif base == sources:
        yield Objection(f"this commit is the release {sources}", "release from the commit after it")
    elif asked != base:
        yield Objection(f"this checkout becomes {base}, not {asked}",
                        f"give VERSION={base}, or set SOURCES in {VERSION_FILE} to '{asked}.dev0' and commit")
    elif latest := [each for each in earlier if _numbers(each) > _numbers(asked)]:
        yield Objection(f"{asked} is before {max(latest, key=_numbers)}, which was released", later)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def of_surface(old: Tree, new: Tree, text: str) -> Iterator[Objection]:
    """Object to changes of what plugins import that the contract's number or *text*, the entries, hides."""
    found = surface.changes(old, new)
    major, minor = new.version
    status, sentence = surface.verdict(old, new, found)
    if status or (found and new.version <= old.version):
        yield Objection(f"what plugins import has changed: {sentence}",
                        "raise CONTRACT in kproxy_core/contract/values.py; see make surface COMPARE=REV")
    if major > old.version[0]:
        if f"contract {major}.{minor}" not in text.lower():
            yield Objection(f"the entries do not name contract {major}.{minor}",
                            "say in changelog.d what authors of backends have to change")
    elif unnamed := _unnamed({_name(change) for change in found}, text):
        yield Objection(f"what plugins import has changed, and no entry names {', '.join(unnamed)}",
                        "name each in changelog.d, as `code`")


def _name(change: Change) -> str:
    """Return the name by which an entry names a change: of a parameter, that of its function."""
    return change.name.partition("(")[0].removeprefix("hook ").rpartition(".")[2]


def of_fields(old: Schema, new: Schema, text: str) -> Iterator[Objection]:
    """Object to changed fields of the configuration, by its schemas, that no entry of *text* names."""
    before, after = dict(fields(old)), dict(fields(new))
    # 0.2.0 had no schema.
    changed = {path for path in {*before, *after} if before and before.get(path) != after.get(path)}
    if unnamed := _unnamed(changed, text):
        yield Objection(f"the configuration has changed, and no entry names {', '.join(unnamed)}",
                        "name each in changelog.d, as `code`")


def _unnamed(names: set[str], text: str) -> list[str]:
    """Return those of *names* of which *text* does not have the last word, as code."""
    words = {word for code in re.findall(r"`([^`]*)`", text) for word in re.findall(r"\w+", code)}
    return sorted(name for name in names if name.rpartition(".")[2] not in words)


def fields(schema: Schema, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths of the fields in a JSON schema of an object, with their own schemas."""
    for name, of in schema.get("properties", {}).items():
        if "properties" in of:
            yield from fields(of, f"{path}{name}.")
        else:
            yield f"{path}{name}", json.dumps(of, sort_keys=True)


class Asked(NamedTuple):
    """What the caller gave."""

    version: str
    key: Path
    since: str
    """The commit of the last release; "": the newest tag; `NOTHING`: compare with nothing."""
    images: str
    """The program that builds images; "": podman; `NOTHING`: none."""


def objections(root: Path, asked: Asked, since: str, builder: str) -> Iterator[Objection]:
    """Yield all that speaks against a release of *root*. *since*: the last release; *builder*: of images."""
    page = (root / changelog.PAGE).read_text(encoding="utf-8")
    tags = run(["git", "tag", "--list", "v*"], root).split()
    earlier = list(changelog.versions(page))
    yield from of_version(asked.version, SOURCES, [*earlier, *(tag.removeprefix("v") for tag in tags)])
    status = run(["git", "status", "--porcelain"], root).splitlines()
    if changed := [line.split(maxsplit=1)[1] for line in status]:
        more = f" and {len(changed) - _SHOWN} more" if changed[_SHOWN:] else ""
        yield Objection(f"not committed: {', '.join(changed[:_SHOWN])}{more}", "commit or remove it")
    text = ""
    try:
        text = changelog.as_text(changelog.unreleased(root))
    except changelog.ChangelogError as error:
        yield Objection(str(error), "make changelog prints what the release says")
    else:
        if not text:
            yield Objection("no entry says what changes", "add changelog.d/NAME.KIND.md: CONTRIBUTING.md")
    if schema.FILE.read_text(encoding="utf-8") != schema.updated():
        yield Objection("the chart's schema is not that of the configuration",
                        "run python -m tests.deploy.schema, and commit")
    if since:
        try:
            old, new = surface.commit(since, root), surface.directory(root)
            yield from of_surface(Tree(old), Tree(new), text)
            yield from of_fields(_configuration(old), _configuration(new), text)
        except (ValueError, LookupError) as error:
            yield Objection(f"cannot compare with the last release: {error}", "SINCE=REV names its commit")
    elif earlier and asked.since != NOTHING:
        yield Objection(f"{earlier[0]} has no tag to compare with",
                        f"SINCE=REV names its commit, SINCE={NOTHING} compares nothing")
    try:
        runpy.run_path(str(root / "setup.py"))["compiled_programs"]()
    except OSError as error:
        yield Objection(f"the BPF programs cannot be compiled: {error}",
                        "run as root, because bcc makes maps in the kernel; apt-get install python3-bpfcc")
    yield from of_key(root, asked.key)
    if not builder and asked.images != NOTHING:
        yield Objection(f"{asked.images or PODMAN} is missing, which builds the images",
                        f"install it, name another with IMAGES=PROGRAM, or leave them out: IMAGES={NOTHING}")
    for program, package in (("dpkg-deb", "dpkg"), ("ssh-keygen", "openssh-client")):
        if shutil.which(program) is None:
            yield Objection(f"{program} is missing", f"as root: apt-get install {package}")


def _configuration(source: surface.Source) -> Schema:
    found = json.loads(source("deploy/chart/values.schema.json") or "{}")
    config: Schema = found.get("properties", {}).get("config", {})
    return config


def of_key(root: Path, key: Path) -> Iterator[Objection]:
    """Object to a key whose signature nobody can check."""
    naming = "KEY=FILE names the key that signs, which has its public half beside it"
    if key.is_dir():
        yield Objection("no key is given", naming)
        return
    try:
        if not evidence.is_signer(root, key):
            yield Objection(f"{key} is no key that signs releases",
                            f"add to {evidence.SIGNERS}, and commit: {evidence.signer(key)}")
    except BuildError as error:
        yield Objection(str(error), naming)


# Commits.

def release(root: Path, version: str) -> None:
    """Make *root* the sources of the release."""
    _replace(root / VERSION_FILE, {f'SOURCES = "{SOURCES}"': f'SOURCES = "{version}"'})
    for path, texts in _IN_DEVELOPMENT.items():
        _replace(root / path, {old: new.format(version) for old, new in texts.items()})
    page = root / changelog.PAGE
    entries = changelog.unreleased(root)
    page.write_text(changelog.released(page.read_text(encoding="utf-8"), version, entries), encoding="utf-8")
    for fragment in (root / changelog.DIRECTORY).glob("*.md"):
        fragment.unlink()


def develop(root: Path, version: str) -> None:
    """Make *root*, the sources of a release, those of the next minor one."""
    major, minor, _ = _numbers(version)
    _replace(root / VERSION_FILE, {f'SOURCES = "{version}"': f'SOURCES = "{major}.{minor + 1}.0.dev0"'})
    for path, texts in _IN_DEVELOPMENT.items():
        _replace(root / path, {new.format(version): old for old, new in texts.items()})


def _replace(path: Path, texts: Mapping[str, str]) -> None:
    text = path.read_text(encoding="utf-8")
    for old, new in texts.items():
        if old not in text:
            raise BuildError(f"{path.name} does not say {old.strip()!r}")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def commit(root: Path, message: str) -> str:
    """Commit everything in *root*, at the time of the commit before, so that a repetition is the same."""
    time = run(["git", "log", "-1", "--format=%ct +0000"], root)
    run(["git", "add", "--all"], root)
    run(["git", "commit", "--quiet", "--no-verify", "--no-gpg-sign", f"--message={message}"], root,
        {"GIT_AUTHOR_DATE": time, "GIT_COMMITTER_DATE": time})
    return run(["git", "rev-parse", "HEAD"], root)


# The files.

def notes(version: str, entries: changelog.Sections, compared: str) -> str:
    """Return what operators read before they upgrade. *compared*: what changed for plugins, a sentence."""
    def block(title: str, headings: Sequence[str], otherwise: str = "Nothing.") -> str:
        found = {heading: entries[heading] for heading in headings if heading in entries}
        text = changelog.as_text(found) if len(headings) > 1 else "".join(found.values())
        text = text or f"{otherwise}\n"
        return f"## {title}\n\n{text}"

    new = [heading for heading in entries if heading.startswith("Added")]
    return "\n".join((
        f"# kproxy {version}\n",
        block("What to do before the upgrade", [changelog.BEFORE]),
        block("What changes for you", ["Changed", "Deprecated", "Removed"]),
        block("The way back", [changelog.BACK], "Install the release before, as docs/deploy.md shows."),
        f"## For authors of backends\n\n{compared}.\n",
        block("What is new", new or ["Added"]),
        block("What works that did not", ["Mended"]),
        f"## Check these files\n\n    {evidence.check('allowed_signers')}\n\n"
        f"with {evidence.SIGNERS} of a checkout that you trust.\n"))


def make(root: Path, directory: Path, asked: Asked, since: str, builder: str) -> tuple[str, str]:
    """Write the release to *directory*; return its commit and the next one. Raises BuildError."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "kproxy"
        run(["git", "worktree", "add", "--quiet", "--detach", work], root)
        try:
            entries = changelog.unreleased(work)
            release(work, asked.version)
            made = commit(work, f"release: kproxy {asked.version}")
            files = Path(scratch) / "files"
            files.mkdir()
            for build in (artefacts.packages, artefacts.deb, artefacts.chart):
                print(f"building {build.__name__}", flush=True)
                build(work, files)
            if builder:
                print("building images", flush=True)
                artefacts.images(work, files, builder)
            name = f"kproxy-{asked.version}"
            (files / f"{name}.cdx.json").write_text(evidence.as_json(evidence.parts(work)))
            (files / f"{name}-notes.md").write_text(notes(asked.version, entries, _compared(work, since)))
            statement = evidence.provenance(work, evidence.digests(files))
            (files / f"{name}.intoto.json").write_text(evidence.as_json(statement))
            evidence.sign(work, files, asked.key)
            develop(work, asked.version)
            after = commit(work, "release: Begin the next one")
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(files, directory)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", work], cwd=root, check=False)
    return made, after


def _compared(root: Path, since: str) -> str:
    new = Tree(surface.directory(root))
    if not since:
        return f"Contract {new.version[0]}.{new.version[1]}, compared with no earlier release"
    old = Tree(surface.commit(since, root))
    return surface.verdict(old, new, surface.changes(old, new))[1].capitalize()


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.release", description="Make a release from this commit.")
    parser.add_argument("version")
    parser.add_argument("--key", type=Path, required=True, help="signs: a key of ssh, beside its public half")
    parser.add_argument("--since", default="", help="the release before, if it has no tag; or none")
    parser.add_argument("--images", default="", help="the program that builds images, or none")
    given = parser.parse_args(words)
    asked = Asked(given.version, given.key.expanduser().absolute(), given.since, given.images)
    root = CHECKOUT
    since = "" if asked.since == NOTHING else asked.since or _last_tag(root)
    builder = "" if asked.images == NOTHING else shutil.which(asked.images or PODMAN) or ""
    if found := list(objections(root, asked, since, builder)):
        print(f"kproxy {asked.version} is not released:", *found, sep="\n- ", file=sys.stderr)
        return 1
    directory = root / "dist" / f"kproxy-{asked.version}"
    try:
        made, after = make(root, directory, asked, since, builder)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"""
The files are in {directory.relative_to(root)}. Once .ci/run has passed in this commit, publish them with

    git tag --sign --message='kproxy {asked.version}' v{asked.version} {made[:12]}
    git merge --ff-only {after[:12]}
    git push origin HEAD v{asked.version}""")
    return 0


def _last_tag(root: Path) -> str:
    command = ["git", "describe", "--tags", "--abbrev=0", "--match=v[0-9]*"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

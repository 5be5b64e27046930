"""What goes with the files of a release: their parts, how they were built, checksums and a signature.

``python -m deploy.evidence`` prints the list of parts: `make sbom`.
"""

import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from deploy.artefacts import CHECKOUT, BuildError, run, version

SUMS = "SHA256SUMS"
SIGNERS = "deploy/allowed_signers"
"""The keys whose signature of a release counts (ssh-keygen(1), ALLOWED SIGNERS)."""
IDENTITY = NAMESPACE = "kproxy"
_PIN = re.compile(r"^([\w.-]+)==(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def as_json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def parts(root: Path) -> dict[str, Any]:
    """Return the Python packages that the image and the package for Debian are made of (CycloneDX 1.5).

    The hashes of a part are those of its wheels, one of which is installed.
    """
    pinned = _PIN.findall((root / "deploy" / "requirements.txt").read_text(encoding="utf-8"))
    own = f"pkg:generic/kproxy@{version(root)}"
    components = [{
        "type": "library", "bom-ref": f"pkg:pypi/{name}@{number}", "name": name, "version": number,
        "purl": f"pkg:pypi/{name}@{number}",
        "hashes": [{"alg": "SHA-256", "content": each} for each in re.findall(r"sha256:(\w+)", hashes)],
    } for name, number, hashes in pinned]
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": {
            "type": "application", "bom-ref": own, "name": "kproxy", "version": version(root), "purl": own,
            "licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [each["bom-ref"] for each in components]}],
    }


def provenance(root: Path, files: Mapping[str, str]) -> dict[str, Any]:
    """Return how *files*, hashes by name, were built: an in-toto statement with SLSA's predicate, v1."""
    commit = run(["git", "rev-parse", "HEAD"], root)
    pins = "deploy/requirements.txt"
    tools = {name: installed(name) for name in ("pip", "setuptools", "wheel")} | {
        "dpkg": run(["dpkg-deb", "--version"], root).split()[6], "python": platform.python_version()}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(files.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://kproxy.dev/make-release/v1",
                "externalParameters": {"version": version(root)},
                "internalParameters": {"tools": tools},
                "resolvedDependencies": [
                    {"name": "kproxy", "digest": {"gitCommit": commit}},
                    {"name": pins, "digest": {"sha256": digest(root / pins)}},
                ],
            },
            "runDetails": {"builder": {"id": "https://kproxy.dev/make-release"}},
        },
    }


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 hashes of the files in *directory* by name."""
    return {path.name: digest(path) for path in sorted(directory.iterdir())}


def public_key(key: Path) -> str:
    """Return the public half of *key*, a private key, or a public one whose other half an agent holds.

    Raises BuildError.
    """
    public = key if key.suffix == ".pub" else key.with_name(f"{key.name}.pub")
    if not public.exists():
        raise BuildError(f"{public} does not exist")
    words = public.read_text(encoding="utf-8").split()
    return " ".join(words[:2])


def signer(key: Path) -> str:
    """Return the line of `SIGNERS` for *key*. Raises BuildError."""
    return f'{IDENTITY} namespaces="{NAMESPACE}" {public_key(key)}'


def is_signer(root: Path, key: Path) -> bool:
    """Return whether the public half of *key* is one of those that sign releases. Raises BuildError."""
    lines = (root / SIGNERS).read_text(encoding="utf-8").splitlines()
    return any(line.startswith(f"{IDENTITY} ") and public_key(key) in line for line in lines)


def sign(root: Path, directory: Path, key: Path) -> None:
    """Write SHA256SUMS of the files in *directory*, sign it, and check both. Raises BuildError."""
    sums = directory / SUMS
    lines = [f"{digest}  {name}\n" for name, digest in digests(directory).items()]
    sums.write_text("".join(lines), encoding="ascii")
    run(["ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", NAMESPACE, sums], root)
    run(["sh", "-c", check(str(root / SIGNERS))], directory)


def check(signers: str) -> str:
    """Return the command that checks the files of a release where they are."""
    return (f"ssh-keygen -Y verify -f {signers} -I {IDENTITY} -n {NAMESPACE} -s {SUMS}.sig < {SUMS} &&"
            f" sha256sum --check --quiet {SUMS}")


def main(words: Sequence[str]) -> int:
    print(as_json(parts(CHECKOUT)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

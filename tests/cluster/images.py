"""Images without a registry: archives that containerd and buildah can read, each made of one directory."""

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from kproxy_conformance.network.namespaces import run

BASE = "docker.io/library/debian:bookworm-slim"
"""What deploy/Containerfile starts from."""
CHECKOUT = Path(__file__).parents[2]


def archive(path: Path, root: Path, names: Sequence[str], **config: object) -> Path:
    """Write an image with the files in *root* to *path*, and return it. *config*: such as ``Entrypoint``."""
    layer = path.with_suffix(".layer")
    run("tar", "-C", str(root), "--numeric-owner", "-cf", str(layer), ".", timeout=600)
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    image = json.dumps({
        "architecture": "amd64", "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": "tests.cluster"}]}).encode()  # buildah counts them
    manifest = [{"Config": "config.json", "RepoTags": list(names), "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as made:
        for name, data in (("config.json", image), ("manifest.json", json.dumps(manifest).encode())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            made.addfile(member, io.BytesIO(data))
        made.add(layer, "layer.tar")
    layer.unlink()
    return path


def of_a_program(path: Path, program: Path, names: Sequence[str], root: Path) -> Path:
    """Write an image of one static *program*."""
    root.mkdir()
    shutil.copy(program, root)
    return archive(path, root, names, Entrypoint=[f"/{program.name}"])


def debian(root: Path, packages: Sequence[str] = ()) -> Path:
    """Make a minimal Debian in *root*, and return it."""
    more = [f"--include={','.join(packages)}"] if packages else []
    run("debootstrap", "--variant=minbase", *more, "bookworm", str(root), timeout=1800)
    # What this machine trusts besides: a proxy before the package index may have an authority of its own.
    trusted = Path("/usr/local/share/ca-certificates")
    shutil.copytree(trusted, root / trusted.relative_to("/"), dirs_exist_ok=True)
    (root / "etc" / "pip.conf").write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
    return root


def kproxy(directory: Path, base: Path, name: str) -> list[Path]:
    """Build deploy/Containerfile as it is on the Debian in *base*, and return the archives of its images.

    They are called *name* and, for the ebpf mode, *name*-ebpf.
    """
    storage = ("--root", str(directory / "storage"), "--runroot", str(directory / "runroot"),
               "--storage-driver", "vfs")  # fmt: skip
    started = archive(directory / "base.tar", base, [BASE], Env=["PATH=/usr/sbin:/usr/bin:/sbin:/bin"])
    run("buildah", *storage, "pull", f"docker-archive:{started}", timeout=600)
    containerfile = str(CHECKOUT / "deploy" / "Containerfile")
    made = []
    for target in ("kproxy", "ebpf"):
        tag = name if target == "kproxy" else f"{name}-{target}"
        run("buildah", *storage, "bud", "--isolation", "chroot", "--pull-never", "--network", "host",
            "--layers", "-f", containerfile, "--target", target, "-t", tag, str(CHECKOUT), timeout=3600)
        path = directory / f"{target}.tar"
        run("buildah", *storage, "push", tag, f"docker-archive:{path}:{tag}", timeout=1800)
        made.append(path)
    return made


def names_in_the_suite(binaries: Path, *images: str) -> list[str]:
    """Return the names by which Kubernetes' suite uses *images*, one for each version."""
    listed = run(str(binaries / "e2e.test"), "--list-images").split()
    return [name for image in images for name in listed if f"/{image}:" in name]

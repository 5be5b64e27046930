"""The image installs what `setup.cfg` asks for, in pinned versions and with hashes."""

import re
from configparser import ConfigParser

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.objects import DEPLOY

PINNED = re.compile(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def test_every_requirement_is_pinned_with_hashes() -> None:
    text = (DEPLOY / "requirements.txt").read_text()
    pins = {canonicalize_name(found[1]): found[2] for found in PINNED.finditer(text)}
    assert len(pins) == text.count("=="), "a line without a hash"
    setup = ConfigParser()
    setup.read(DEPLOY.parent / "setup.cfg")
    for line in setup["options"]["install_requires"].split("\n"):
        if line and not line.startswith("#"):
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


def test_the_image_installs_nothing_else() -> None:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", "")
    first, second = re.findall(r"bin/pip install (.*?)(?: && |\n)", text)
    assert "--require-hashes --only-binary :all: --requirement /src/deploy/requirements.txt" in first
    assert second.split()[-3:] == ["--no-deps", "--no-build-isolation", "/src"]

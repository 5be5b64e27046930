"""The roles for users of ``kubectl kproxy`` allow exactly the requests that its commands make."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kproxy_core.cli.kubectl import COMMANDS
from tests.deploy.objects import DEPLOY
from tests.fleet.canned import Canned

USES = {
    "status": (), "diff": (), "verify": ("--traffic",), "top": (), "report": ("{directory}/reports",),
    "switch": ("nftables", "--check"),
}  # fmt: skip
"""The arguments with which each command makes all of its requests."""


@pytest.fixture
def canned(tmp_path: Path) -> Iterator[Canned]:
    made = Canned(tmp_path)
    yield made
    made.server.stop()


def test_the_roles_allow_exactly_the_requests_made(canned: Canned, tmp_path: Path) -> None:
    assert set(USES) == set(COMMANDS)
    canned.node("node", "exit 1")
    for command, arguments in USES.items():
        canned.kubectl(command, *(argument.format(directory=tmp_path) for argument in arguments))
    assert len(canned.asked) == len(USES)
    allowed = {
        (verb, resource, role["metadata"].get("namespace", ""))
        for role in yaml.safe_load_all((DEPLOY / "user-rbac.yaml").read_text())
        for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }  # fmt: skip
    assert canned.server.authorized == allowed

"""The roles for users of ``kubectl kproxy`` allow exactly the requests that its commands make."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kproxy_core.cli.kubectl import COMMANDS
from tests.deploy.objects import DEPLOY
from tests.fleet.canned import Canned
from tests.fleet.fleet import pod_object, service

USES = {
    "status": (), "diff": (), "verify": ("--traffic",), "top": (), "report": ("{directory}/reports",),
    "switch": ("nftables", "--check"), "explain": ("shop/web", "shop/web"),
}  # fmt: skip
"""The arguments with which each command makes all of its requests."""


@pytest.fixture
def canned(tmp_path: Path) -> Iterator[Canned]:
    made = Canned(tmp_path)
    yield made
    made.server.stop()


def test_the_roles_allow_exactly_the_requests_made(canned: Canned, tmp_path: Path) -> None:
    assert set(USES) == set(COMMANDS) - {"version"}  # asks nobody
    canned.node("node-a", "exit 1")
    for obj in (pod_object("node-a", "web"), service(selector={"app": "web"})):
        canned.server.store.apply(obj)
    answers = {
        command: canned.kubectl(command, *(argument.format(directory=tmp_path) for argument in arguments))
        for command, arguments in USES.items()
    }
    # In full: a "top" that was not asked was seen twice, with an error that ends with "HTTP/1.1'".
    said = "\n".join(
        f"{command}: {answer.exception!r}\n{answer.output}" for command, answer in answers.items())
    assert {words.split()[1] for words in canned.asked} == set(USES), said
    allowed = {
        (verb, resource, role["metadata"].get("namespace", ""))
        for role in yaml.safe_load_all((DEPLOY / "user-rbac.yaml").read_text())
        for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }  # fmt: skip
    used = {
        (verb, resource, namespace if (verb, resource, namespace) in allowed else "")
        for verb, resource, namespace in canned.server.authorized
    }  # fmt: skip
    assert used == allowed

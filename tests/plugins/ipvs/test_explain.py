"""The rules, set entries and virtual servers that packets meet in the ipvs mode."""

import pytest

from kproxy_core.model.address import Family, parse_address
from kproxy_core.model.service import Destination
from kproxy_ipvs.explain import explain
from kproxy_ipvs.kernel.connections import parse_template
from kproxy_ipvs.settings import Settings
from tests.plugins.explained import agrees, questions

CONNECTIONS = """\
Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
TCP C6336407 8A0C 0A600001 0050 0A01010B 1F90 ESTABLISHED     899
TCP C6336407 0000 0A600001 0050 0A01010C 1F90 NONE            359
"""


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_the_objects_that_would_be_written_decide_as_the_plans_say(family: Family) -> None:
    asked = questions(family)
    for question, side in zip(asked, explain(asked, Settings(), live=False), strict=True):
        assert agrees(question, side), (question.packet, side)


def test_persistence_s_template_names_the_endpoint_that_is_remembered() -> None:
    lines = CONNECTIONS.splitlines()
    frontend = Destination(parse_address("10.96.0.1"), 80)
    assert parse_template(parse_address("198.51.100.7"), frontend, lines) == Destination(
        parse_address("10.1.1.12"), 8080)
    assert parse_template(parse_address("198.51.100.8"), frontend, lines) is None

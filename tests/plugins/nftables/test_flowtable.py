"""The option `flowtable`: its values, and the results of `flowtable_checks`, which runs in a guest kernel."""

from pathlib import Path

import pytest

from kproxy_conformance.builders import full_update, node_view
from kproxy_core.contract.errors import InvalidOption
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family
from kproxy_nftables.backend import NftablesBackend
from kproxy_nftables.render import render_text
from kproxy_nftables.settings import Settings, read_settings
from tests.guest.checks import Problems, names_of, play

CHECKS = [Path(__file__).with_name("flowtable_checks.py")]


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("name", names_of(CHECKS))
def test_in_the_guest(name: str, from_guest: Problems) -> None:
    assert name in from_guest
    assert not any(from_guest[name]), "\n".join(from_guest[name])


@pytest.mark.parametrize(("given", "devices"), [
    (None, ()), ([], ()), (["eth0", "cni-1.2@x"], ("eth0", "cni-1.2@x")), (["eth0", "eth0"], ("eth0",)),
])  # fmt: skip
def test_devices_are_read(given: object, devices: tuple[str, ...]) -> None:
    assert read_settings(BackendSettings(tuple(Family), options={"flowtable": given})).flowtable == devices


@pytest.mark.parametrize(("given", "words"), [
    ("eth0", "'eth0': must be a list of network devices"),
    (True, "True: must be a list of network devices"),
    (["eth0", 1], "1: must be the name of a network device"),
    ([""], "'': must be the name of a network device"),
    (["a-name-too-long1"], "'a-name-too-long1': must be the name of a network device"),
    (['eth0"; }'], "must be the name of a network device"),
    (["eth*"], "must be the name of a network device"),
])  # fmt: skip
def test_wrong_values_are_refused_with_the_name_of_the_option(given: object, words: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        read_settings(BackendSettings(tuple(Family), options={"flowtable": given}))
    assert str(refused.value).startswith("flowtable: ")
    assert words in str(refused.value)


def test_rules_have_no_flowtable_without_devices() -> None:
    update = full_update(node_view(), {})
    assert "flow" not in render_text(update)
    assert 'devices = { "eth0", "cni0" }' in render_text(update, Settings(flowtable=("eth0", "cni0")))


def test_rendered_rules_are_checked_without_the_devices_of_the_node() -> None:
    backend = NftablesBackend(BackendSettings((Family.IPV4,), options={"flowtable": ["eth7"]}))
    assert backend.check_text(full_update(node_view(), {})) == ""

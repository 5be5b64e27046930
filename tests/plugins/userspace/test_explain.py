"""The portals and relays that packets meet in the userspace mode."""

import socket
import subprocess
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kproxy_conformance.checks.bench import lonely_node
from kproxy_conformance.checks.features import everything
from kproxy_conformance.checks.subject import full
from kproxy_core.app.explain import AGREES, DEVIATES, judge
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings, KernelSide, Question
from kproxy_core.linux import programs
from kproxy_core.model.address import Family, Protocol, format_address, format_socket, parse_address
from kproxy_core.plan.fate import Origin, Outcome
from kproxy_core.plan.service_plan import Frontend
from kproxy_userspace.explain import frontends
from kproxy_userspace.kernel.portals import NftPortals
from kproxy_userspace.names import TABLE
from kproxy_userspace.skeleton import NODE_PORTS, RANGED_VIPS, VIPS
from kproxy_userspace.wanted import Portal, Redirect
from tests.nft_releases.releases import BOOKWORM, TRIXIE
from tests.patience import PATIENCE
from tests.plugins.explained import decided, questions

FAMILIES = pytest.mark.parametrize("family", Family, ids=lambda family: family.label)


@pytest.fixture
def sides(family: Family) -> Iterator[list[tuple[Question, KernelSide, KernelSide]]]:
    """Each question with the kernel's objects, and with those that would be written."""
    registry = Registry()
    with lonely_node():
        instance = registry.make_backend("userspace", BackendSettings((family,)))
        full(instance, family, everything(family))
        asked = questions(family)
        live, written = instance.explain(asked, live=True), instance.explain(asked, live=False)
        assert live is not None
        assert written is not None
        yield list(zip(asked, live, written, strict=True))
        instance.close()


@FAMILIES
def test_relays_follow_the_plans_except_for_sources_and_policies(
    family: Family, sides: list[tuple[Question, KernelSide, KernelSide]]
) -> None:
    for question, live, written in sides:
        for side in (live, written):
            assert judge(question.packet, decided(question), side)[0] in (AGREES, DEVIATES), (question, side)


@FAMILIES
def test_the_relay_of_a_packet_is_named_with_its_port_and_endpoints(
    family: Family, sides: list[tuple[Question, KernelSide, KernelSide]]
) -> None:
    for question, live, _ in sides:
        if live.fate is not None and live.fate.outcome is Outcome.FORWARDED:
            assert question.plan is not None
            relay = live.objects[-1]
            assert relay.where == "relay"
            assert relay.text.startswith("port ")
            for where in question.plan.cluster or question.plan.local:
                assert format_socket(*where) in relay.text


@FAMILIES
def test_the_endpoint_that_affinity_keeps_for_a_client_is_named(family: Family) -> None:
    registry = Registry()
    sticky = next(question for question in questions(family) if question.plan is not None
                  and question.plan.affinity_seconds and question.packet.protocol is Protocol.TCP
                  and question.packet.origin is Origin.NODE and question.plan.cluster)
    assert sticky.plan is not None
    with lonely_node():
        instance = registry.make_backend("userspace", BackendSettings((family,)))
        full(instance, family, everything(family))
        version = "-4" if family is Family.IPV4 else "-6"
        subprocess.run(["ip", version, "route", "add", "default", "dev", "lo"], check=True)
        before = instance.explain([sticky], live=True)
        frontend = format_address(sticky.packet.destination), sticky.packet.port
        with socket.create_connection(frontend, timeout=PATIENCE) as client:
            source = parse_address(client.getsockname()[0])
            asked = replace(sticky, packet=sticky.packet._replace(source=source))
            after = instance.explain([asked], live=True)
        instance.close()
    assert before is not None
    assert after is not None
    assert before[0].remembered is None
    assert after[0].remembered in sticky.plan.cluster


def test_portals_are_read_where_nft_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    portal = Portal(Protocol.TCP, parse_address("10.96.0.10"), 80, "shop/web")
    monkeypatch.setattr(programs, "find", {"nft": BOOKWORM.nft}.get)
    with lonely_node():
        assert frontends(Family.IPV4) == []
        NftPortals(Family.IPV4, None).rewrite([Redirect(portal, 40000)])
        assert TRIXIE.run(f"add set ip {TABLE} s {{ type ifname; }}").returncode == 0
        assert BOOKWORM.run("list table ip", TABLE).returncode < 0
        assert frontends(Family.IPV4) == [Frontend(*portal.frontend)]


@FAMILIES
def test_elements_of_other_processes_are_no_portals(family: Family) -> None:
    address = "10.96.0.10" if family is Family.IPV4 else "fd00:96::10"
    portal = Portal(Protocol.TCP, parse_address(address), 80, "shop/web")
    with lonely_node():
        portals = NftPortals(family, None)
        portals.rewrite([Redirect(portal, 40000)])
        subprocess.run(["nft", "; ".join(
            f"add element {family.ip} {TABLE} {element}" for element in (
                f"{VIPS} {{ * : 7 }}", f"{VIPS} {{ {address} . icmp . 80 : 7 }}",
                f"{RANGED_VIPS} {{ {address} . {address} . tcp . 80-90 : 7 }}",
                f"{NODE_PORTS} {{ gre . 80 : 7 }}",
            ))], check=True)
        assert portals.held() == [Redirect(portal._replace(owner=""), 40000)]
        assert frontends(family) == [portal.frontend]

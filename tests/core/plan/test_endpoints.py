"""The endpoints of a service port: merged from its slices, and chosen by every row of kube-proxy's rules."""

from collections.abc import Mapping
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import (
    destinations,
    endpoint,
    endpoint_slice,
    node_view,
    plans,
    port_spec,
    service,
)
from kproxy_core.model.service import Candidate, Destination, Endpoint, EndpointSlice
from kproxy_core.plan.endpoints import endpoints_of
from kproxy_core.plan.service_plan import ServicePlan

# -- merged from slices

PORT = port_spec("http:80")

ENDPOINTS = st.builds(
    lambda n, ready, terminating: endpoint(f"10.0.0.{n}", ready=ready, serving=True, terminating=terminating),
    st.integers(1, 12), st.booleans(), st.booleans(),
)  # fmt: skip
SLICES = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        lambda endpoints, ports: endpoint_slice("web", *endpoints, ports=ports),
        st.lists(ENDPOINTS, min_size=1),
        st.sampled_from([("http:8080",), ("http:8080", "http:8081"), ("http:8080", "other:9"), ("other:9",)]),
    ),
)


def one_by_one(slices: Mapping[str, EndpointSlice]) -> list[Candidate]:
    """Merge without remembering anything."""
    found: dict[Destination, Candidate] = {}
    for name in sorted(slices):
        for port in slices[name].ports:
            for each in slices[name].endpoints if port.name == PORT.name else ():
                where = Destination(each.address, port.port)
                if not (each.terminating and where in found):
                    found[where] = where, each
    return [found[where] for where in sorted(found)]


@given(SLICES)
def test_slices_are_merged_in_order_and_without_duplicates(slices: dict[str, EndpointSlice]) -> None:
    assert list(endpoints_of(PORT, slices)) == one_by_one(slices)
    assert list(endpoints_of(PORT, slices)) == one_by_one(slices)


def test_a_slice_that_did_not_change_is_not_read_again() -> None:
    slices = {name: endpoint_slice("web", f"10.0.{name}.1", ports=("http:8080",)) for name in "123"}
    endpoints_of(PORT, slices)
    rows = {name: piece.rows[PORT.name, PORT.protocol] for name, piece in slices.items()}
    changed = {**slices, "2": endpoint_slice("web", "10.0.2.9", ports=("http:8080",))}
    assert [where for where, _ in endpoints_of(PORT, changed)] == [
        slices["1"].rows[PORT.name, PORT.protocol][0][1][0],
        changed["2"].rows[PORT.name, PORT.protocol][0][1][0],
        slices["3"].rows[PORT.name, PORT.protocol][0][1][0],
    ]
    assert all(changed[name].rows[PORT.name, PORT.protocol] is rows[name] for name in "13")


# -- the choice of usable ones

HERE, THERE = "node1", "node2"
NODE = node_view(HERE, zone="z1")


def ep(number: int, node: str = THERE, **conditions: object) -> Endpoint:
    return endpoint(f"10.0.0.{number}", node, **conditions)  # type: ignore[arg-type]


def ending(number: int, node: str = THERE, *, serving: bool = True) -> Endpoint:
    """An endpoint that terminates."""
    return endpoint(f"10.0.0.{number}", node, ready=False, serving=serving, terminating=True)


class Row(NamedTuple):
    """Endpoints, and the last numbers of the addresses of those that are used."""

    what: str
    endpoints: list[Endpoint]
    cluster: str
    local: str = ""
    any: bool = True
    internal_local: bool = False
    external_local: bool = False
    node_port: bool = True
    zone: str = "z1"


ROWS = [
    Row("no endpoints", [], "", any=False),
    Row("ready ones are used", [ep(1), ep(2)], "1 2"),
    Row("one that is not ready is not", [ep(1), ep(2, ready=False)], "1"),
    Row("ready and terminating is ready (publishNotReadyAddresses)", [ep(1, terminating=True)], "1"),
    Row("neither ready nor serving", [ep(1, ready=False), ending(2, serving=False)], "", any=False),
    Row("serving but not terminating is no fallback", [ep(1, ready=False, serving=True)], "", any=False),
    # Terminating ones
    Row("terminating ones step in", [ending(1), ending(2), ep(3, ready=False)], "1 2"),
    Row("but not beside a ready one", [ending(1), ep(2)], "2"),
    # Hints
    Row("all hinted, two for this zone", [ep(1, zones="z1"), ep(2, zones="z1 z2"), ep(3, zones="z2")], "1 2"),
    Row("one without hints: hints do not count", [ep(1, zones="z2"), ep(2, zones="z1"), ep(3)], "1 2 3"),
    Row("one that is not ready need not have hints",
        [ep(1, zones="z1"), ep(2, zones="z2"), ep(3, ready=False)], "1"),
    Row("hinted for other zones only", [ep(1, zones="z2"), ep(2, zones="z3")], "1 2"),
    Row("a node without a zone", [ep(1, zones="z1"), ep(2, zones="z2")], "1 2", zone=""),
    Row("hints for this node go before those for its zone",
        [ep(1, zones="z1", nodes=THERE), ep(2, zones="z1", nodes=HERE)], "2"),
    Row("hints for other nodes only: the zone decides",
        [ep(1, zones="z1", nodes=THERE), ep(2, zones="z2", nodes=THERE)], "1"),
    Row("one without a node hint: the zone decides",
        [ep(1, zones="z1"), ep(2, zones="z2", nodes=HERE)], "1"),
    Row("terminating ones are used whatever their hints",
        [endpoint("10.0.0.1", THERE, ready=False, serving=True, terminating=True, zones="z2")], "1"),
    # Local policies
    Row("external Local: local ones beside those of the cluster",
        [ep(1), ep(2, HERE)], "1 2", "2", external_local=True),
    Row("external Local without a local one", [ep(1)], "1", external_local=True),
    Row("hints never apply to local ones",
        [ep(1, zones="z1"), ep(2, HERE, zones="z2")], "1", "2", external_local=True),
    Row("a local terminating one steps in for traffic to local ones only",
        [ep(1), ending(2, HERE)], "1", "2", external_local=True),
    Row("and not beside a local ready one", [ep(1, HERE), ending(2, HERE)], "1", "1", external_local=True),
    Row("only remote terminating ones, external Local", [ending(1)], "1", external_local=True),
    Row("internal Local, nothing external: the cluster's are not used",
        [ep(1), ep(2, HERE)], "", "2", internal_local=True, node_port=False),
    Row("internal Local, all remote: some exist all the same",
        [ep(1)], "", internal_local=True, node_port=False),
    Row("internal Local, remote terminating ones exist",
        [ending(1)], "", internal_local=True, node_port=False),
    Row("internal Local, none usable",
        [ep(1, ready=False)], "", any=False, internal_local=True, node_port=False),
    Row("both Local: external traffic still short-circuits to the cluster's",
        [ep(1), ep(2, HERE)], "1 2", "2", internal_local=True, external_local=True),
    Row("external Local without anything external means nothing",
        [ep(1), ep(2, HERE)], "1 2", external_local=True, node_port=False),
]


def plan_of(row: Row) -> ServicePlan:
    wanted = service(
        "web", "80@30080" if row.node_port else "80",
        internal_local=row.internal_local, external_local=row.external_local,
    )
    (plan,) = plans(
        node_view(HERE, zone=row.zone), wanted, endpoint_slice("web", *row.endpoints)
    ).values()
    return plan


def used(numbers: str) -> object:
    return destinations(" ".join(f"10.0.0.{number}:8080" for number in numbers.split()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_the_endpoints_that_are_used(row: Row) -> None:
    plan = plan_of(row)
    assert (plan.cluster, plan.local, plan.has_endpoints) == (used(row.cluster), used(row.local), row.any)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_hairpins_are_the_local_reachable_addresses(row: Row) -> None:
    """Hairpins are the addresses of this node among all that may be reached."""
    plan = plan_of(row)
    local = {e.address for e in row.endpoints if e.node == HERE}
    assert set(plan.hairpins) == {d.address for d in plan.reachable} & local
    assert len(set(plan.reachable)) == len(plan.reachable)


def test_a_node_that_does_not_know_its_name_has_no_local_endpoints() -> None:
    web = service("web", "80@30080", external_local=True)
    (plan,) = plans(node_view(""), web, endpoint_slice("web", endpoint("10.0.0.1", ""))).values()
    assert (plan.cluster, plan.local) == (destinations("10.0.0.1:8080"), ())


endpoints = st.lists(
    st.builds(
        lambda n, node, ready, serving, terminating, zones: endpoint(
            f"10.0.0.{n}", node, ready=ready, serving=serving, terminating=terminating, zones=zones
        ),
        st.integers(1, 9), st.sampled_from([HERE, THERE]),
        st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["", "z1", "z2"]),
    ),
    max_size=6, unique_by=lambda e: e.address,
)


@given(endpoints, st.booleans(), st.booleans(), st.booleans())
def test_traffic_reaches_only_usable_endpoints(
    found: list[Endpoint], internal_local: bool, external_local: bool, node_port: bool
) -> None:
    plan = plan_of(Row(
        "", found, "", internal_local=internal_local, external_local=external_local, node_port=node_port
    ))
    by_address = {e.address: e for e in found}
    for where in plan.reachable:
        assert by_address[where.address].ready or by_address[where.address].serving
    for where in plan.local:
        assert by_address[where.address].node == HERE
    can_answer = any(e.ready or (e.serving and e.terminating) for e in found)
    assert plan.has_endpoints == can_answer
    if can_answer and not plan.has_internal_endpoints:
        assert internal_local
    if can_answer and (node_port or not internal_local):
        assert plan.cluster

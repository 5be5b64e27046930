"""What a node has not been told yet: its answers beside the objects of the API server."""

from datetime import datetime

import pytest

from kproxy_conformance.builders import endpoint, endpoint_slice, service
from kproxy_core.fleet.lags import SETTLED, Answered, Problem, lags
from kproxy_core.model.service import Endpoint, EndpointSlice
from tests.core.fleet.answered_packets import NODE_ADDRESSES, held, says

WEB = service("shop/web", "http:80@30080")
ONE, TWO = endpoint("10.1.1.1", "a"), endpoint("10.1.2.1", "b")
CHANGED = "2026-01-02T00:00:00Z"
THEN = datetime.fromisoformat(CHANGED).timestamp()
CREATED = datetime.fromisoformat("2026-01-01T00:00:00Z").timestamp()


def piece(*endpoints: Endpoint | str, name: str = "web-1", weight: int | None = None) -> EndpointSlice:
    return endpoint_slice("shop/web", *endpoints, ports=["http:8080"], name=name, weight=weight)


OLDER = "knows an older EndpointSlice web-1: "
SLICES = {
    # name: (what the node knows, what the API server has, what is said, the time of the change)
    "the same": ([piece(ONE, TWO)], [piece(ONE, TWO)], "", None),
    "another order": ([piece(TWO, ONE)], [piece(ONE, TWO)], "", None),
    "an endpoint is missing": ([piece(ONE)], [piece(ONE, TWO)], OLDER + "without 10.1.2.1:8080", THEN),
    "an old endpoint": ([piece(ONE, TWO)], [piece(ONE)],
                        OLDER + "with 10.1.2.1:8080, which was removed", THEN),
    "readiness": ([piece(ONE)], [piece(ONE._replace(ready=False, serving=False))],
                  OLDER + "10.1.1.1:8080 ready instead of not ready", THEN),
    "termination": ([piece(ONE)], [piece(ONE._replace(ready=False, terminating=True))],
                    OLDER + "10.1.1.1:8080 ready instead of terminating, and serving", THEN),
    "its end": ([piece(ONE._replace(ready=False, terminating=True))],
                [piece(ONE._replace(ready=False, serving=False, terminating=True))],
                OLDER + "10.1.1.1:8080 terminating, and serving instead of terminating", THEN),
    "hints": ([piece(ONE)], [piece(endpoint("10.1.1.1", "a", zones="z"))],
              OLDER + "10.1.1.1:8080 with other hints or on another node", THEN),
    "weight": ([piece(ONE)], [piece(ONE, weight=0)], OLDER + "weight none instead of 0", THEN),
    "many": ([piece()], [piece(*(f"10.1.1.{n}" for n in range(1, 6)))],
             OLDER + "without 10.1.1.1:8080, without 10.1.1.2:8080, without 10.1.1.3:8080 and 2 more", THEN),
    "a slice is missing": ([piece(ONE)], [piece(ONE), piece(TWO, name="web-2")],
                           "does not know EndpointSlice web-2 (1 endpoint)", CREATED),
    "an empty slice is missing": ([piece(ONE)], [piece(ONE), piece(name="web-2")], "", None),
    "an old slice": ([piece(ONE), piece(TWO, name="web-2")], [piece(ONE)],
                     "still uses EndpointSlice web-2, which the API server does not have", None),
}  # fmt: skip


@pytest.mark.parametrize("name", SLICES)
def test_a_node_lags_by_the_endpoints_that_it_knows(name: str) -> None:
    known, has, what, changed = SLICES[name]
    answered = says("a", "10.96.0.1:80", "pod", WEB, *known)
    found = lags(answered, held(WEB, *has, changed=CHANGED), NODE_ADDRESSES)
    assert found == ([Problem(what, "a", lags=True, changed=changed)] if what else [])


SERVICES = {
    # name: (what the node knows, its version, TO, what the API server has, what is said)
    "the same": (WEB, "7", "10.96.0.1:80", WEB, ""),
    "an older version": (WEB, "6", "10.96.0.1:80", WEB,
                         "knows resource version 6 of Service shop/web, and 7 is the newest"),
    "unknown": (None, "", "10.96.0.1:80", WEB,
                "does not know that 10.96.0.1:80/TCP is of Service shop/web"),
    "an unknown node port": (None, "", "192.0.2.1:30080", WEB,
                             "does not know that 192.0.2.1:30080/TCP is of Service shop/web"),
    "no frontend of it": (None, "", "10.96.0.1:81", WEB, ""),
    "deleted": (WEB, "7", "10.96.0.1:80", None,
                "still serves Service shop/web, which the API server does not have"),
}


@pytest.mark.parametrize("name", SERVICES)
def test_a_node_lags_by_the_service_that_it_knows(name: str) -> None:
    known, version, to, has, what = SERVICES[name]
    answered = says("a", to, "pod", known, piece(ONE), version=version)
    objects = held(has, piece(ONE), changed=CHANGED) if has is not None else {}
    found = lags(answered, objects, NODE_ADDRESSES)
    assert [(problem.what, problem.changed) for problem in found] == (
        [(what, None if has is None else THEN)] if what else [])


def test_a_difference_that_several_packets_show_is_told_once() -> None:
    answered = says("a", "shop/web", "", WEB, piece(ONE))
    assert len(answered.packets) > 1
    assert len(lags(answered, held(WEB, piece(ONE, TWO)), NODE_ADDRESSES)) == 1


def test_only_slices_of_the_packet_s_family_are_compared() -> None:
    answered = says("a", "10.96.0.1:80", "pod", WEB, piece(ONE))
    objects = held(WEB, piece(ONE), piece(endpoint("fd00::1", "a"), name="web-6"))
    assert lags(answered, objects, NODE_ADDRESSES) == []


def test_a_proxy_that_tells_no_slices_and_one_that_reads_files_do_not_lag() -> None:
    def without_slices(answered: Answered) -> Answered:
        return answered._replace(packets=[
            {name: value for name, value in packet.items() if name != "slices"}
            for packet in answered.packets])

    older = without_slices(says("a", "10.96.0.1:80", "pod", WEB, piece(ONE)))
    assert lags(older, held(WEB, piece(ONE, TWO)), NODE_ADDRESSES) == []
    files = says("a", "10.96.0.1:80", "pod", WEB, piece(ONE))
    for packet in files.packets:
        packet["frontend"]["origin"] = "file web.yaml"
    assert lags(files, held(WEB, piece(ONE), version="8"), NODE_ADDRESSES) == []


def test_a_slice_that_is_deleted_while_nodes_are_asked_is_no_old_one() -> None:
    answered = says("a", "10.96.0.1:80", "pod", WEB, piece(ONE), piece(TWO, name="web-2"))
    objects = held(WEB, piece(ONE))
    deleted = {name: found._replace(deleted=frozenset({"web-2"})) for name, found in objects.items()}
    assert len(lags(answered, objects, NODE_ADDRESSES)) == 1
    assert lags(answered, deleted, NODE_ADDRESSES) == []


def test_ports_that_a_slice_lacks_have_no_endpoints() -> None:
    wide = service("shop/web", "http:80", "admin:81")
    answered = says("a", "10.96.0.1:81", "pod", wide, piece(ONE))
    assert lags(answered, held(wide, piece(ONE, TWO)), NODE_ADDRESSES) == []


def test_a_young_change_is_under_way() -> None:
    lag = Problem("", "a", lags=True, changed=THEN)
    assert lag.is_under_way(THEN + SETTLED / 2)
    assert not lag.is_under_way(THEN + 2 * SETTLED)
    assert not lag._replace(changed=None).is_under_way(THEN)
    assert not lag._replace(lags=False).is_under_way(THEN)
    assert lag.as_json(THEN + 9)["seconds"] == 9.0
    assert lag.as_json(THEN - 9)["seconds"] == 0.0  # Clocks differ.

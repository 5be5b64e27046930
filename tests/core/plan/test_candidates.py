"""The endpoints of a service port, merged from its slices."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.model.service import Candidate, Destination, EndpointSlice
from kproxy_core.plan.endpoints import endpoints_of
from kproxy_core.testing.builders import endpoint, endpoint_slice, port_spec

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

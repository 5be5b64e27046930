"""Objects in many files: who counts, who steps in, and what is said once."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import cidrs
from kproxy_core.kube.decode import Malformed
from kproxy_core.kube.directory import Inventory, read_manifest
from kproxy_core.model.events import Event
from tests.core.directory_rig import NODE, State, endpoint_slice, endpoints, node, service, service_cidr, text

Json = dict[str, Any]
Files = dict[str, list[Json] | None]


class Directory(State):
    """The consequences of writing files, without any file."""

    def __init__(self, **files: list[Json]) -> None:
        super().__init__()
        self._inventory = Inventory(NODE)
        self.write(**files)

    def write(self, **files: list[Json] | str | None) -> list[Event]:
        """Files by name; a list holds objects, None: removed, text: unreadable."""
        events = self._inventory.apply({
            name: None if content is None
            else Malformed(content) if isinstance(content, str)
            else read_manifest(name, text(*content).encode())
            for name, content in files.items()
        })
        self.emit(events)
        return events


def test_objects_are_added_changed_and_deleted() -> None:
    directory = Directory(a=[service("web"), endpoint_slice("web", "10.1.0.1")])
    assert (directory.services, directory.endpoints()) == ({"web": 80}, {"10.1.0.1"})
    assert len(directory.write(a=[service("web", port=81), endpoint_slice("web", "10.1.0.1")])) == 1
    assert directory.services == {"web": 81}
    directory.write(a=[service("web", port=81)])
    assert directory.endpoints() == set()
    directory.write(a=None)
    assert directory.services == {}
    assert directory.bad == []


def test_unchanged_objects_cause_no_event() -> None:
    content = [service("web"), endpoint_slice("web", "10.1.0.1"), node(), service_cidr("a", "10.96.0.0/12")]
    directory = Directory(a=content)
    assert directory.write(a=content) == []
    assert directory.write(a=content[::-1]) == []


def test_moving_an_object_to_another_file_is_no_change() -> None:
    directory = Directory(a=[service("web")])
    assert directory.write(a=None, b=[service("web")]) == []
    assert directory.write(c=[service("web")], b=None) == []
    assert directory.services == {"web": 80}


def test_of_two_files_with_one_object_the_first_by_name_is_used() -> None:
    directory = Directory(b=[service("web", port=2)])
    directory.write(a=[service("web", port=1)])
    assert directory.services == {"web": 1}
    directory.write(c=[service("web", port=3)])
    assert directory.services == {"web": 1}
    assert directory.complaints == [
        "Service default/web: is in b as well; the one in a is used",
        "Service default/web: is in c as well; the one in a is used"]
    directory.write(a=None)
    assert directory.services == {"web": 2}
    directory.write(b=[service("other")])
    assert directory.services == {"web": 3, "other": 80}
    assert len(directory.bad) == 2


def test_a_change_of_an_unused_duplicate_causes_no_event() -> None:
    directory = Directory(a=[service("web", port=1)], b=[service("web", port=2)])
    assert directory.write(b=[service("web", port=3)]) == []
    directory.write(a=None)
    assert directory.services == {"web": 3}


def test_an_object_twice_in_one_file() -> None:
    directory = Directory(a=[service("web", port=1), service("web", port=2)])
    assert directory.services == {"web": 1}
    assert directory.complaints == ["Service default/web: is in a more than once"]


def test_an_object_that_became_invalid_keeps_its_last_good_version() -> None:
    directory = Directory(a=[service("web"), service("other")])
    directory.write(a=[service("web", ip="junk"), service("other", port=81)])
    assert directory.services == {"web": 80, "other": 81}
    assert directory.complaints == ["Service default/web: spec.clusterIP: 'junk' is not an IP address"]
    directory.write(a=[service("web", port=82), service("other", port=81)])
    assert directory.services == {"web": 82, "other": 81}
    directory.write(a=[service("web", ip="junk")])
    directory.write(a=[])
    assert directory.services == {}


def test_a_problem_is_reported_once_until_it_changes() -> None:
    bad = service("web", ip="junk")
    directory = Directory(a=[bad])
    directory.write(a=[bad, service("other")])
    assert len(directory.bad) == 1
    directory.write(a=[service("web", ip="junk2")])
    assert len(directory.bad) == 2
    directory.write(a=[service("web")])
    directory.write(a=[bad])
    assert len(directory.bad) == 3


def test_an_unreadable_file_keeps_its_last_good_state() -> None:
    directory = Directory(a=[service("web")])
    directory.write(a="is not YAML")
    directory.write(a="is not YAML")
    assert (directory.services, directory.complaints) == ({"web": 80}, ["file a: is not YAML"])
    directory.write(a="is empty")
    assert directory.complaints[1:] == ["file a: is empty"]
    directory.write(a=[service("other")])
    assert directory.services == {"other": 80}
    directory.write(a="is empty")
    assert len(directory.bad) == 3
    directory.write(a=None)
    assert directory.services == {}


def test_a_service_given_to_another_proxy() -> None:
    directory = Directory(a=[service("web")])
    directory.write(a=[service("web", ip="None")])
    assert directory.services == {}
    assert directory.write(a=None) == []


def test_only_this_nodes_object_is_used() -> None:
    directory = Directory(a=[node("node2", "z2")], b=[node(NODE, "z1")])
    assert directory.store.node is not None
    assert (directory.store.node.name, directory.store.node.zone) == (NODE, "z1")
    assert len(directory.write(b=None)) == 1


def test_service_networks_are_joined() -> None:
    directory = Directory(
        a=[service_cidr("a", "10.96.0.0/12")], b=[service_cidr("b", "10.96.0.0/12", "10.0.0.0/24")])
    assert directory.store.service_cidrs == cidrs("10.0.0.0/24 10.96.0.0/12")
    directory.write(b=None)
    assert directory.store.service_cidrs == cidrs("10.96.0.0/12")


def test_endpoints_are_mirrored_until_there_is_a_slice() -> None:
    directory = Directory(a=[service("web"), endpoints("web", "10.1.0.9")])
    assert directory.endpoints() == {"10.1.0.9"}
    directory.write(b=[endpoint_slice("web", "10.1.0.1")])
    assert directory.endpoints() == {"10.1.0.1"}
    directory.write(a=[service("web"), endpoints("web", "10.1.0.8", "fd00::8")])
    assert directory.endpoints() == {"10.1.0.1"}
    directory.write(b=[endpoint_slice("other", "10.1.0.1", name="web-1")])
    assert directory.endpoints() == {"10.1.0.8", "fd00::8"}
    directory.write(a=[service("web"), endpoints("web", "10.1.0.8")])
    assert directory.endpoints() == {"10.1.0.8"}
    directory.write(a=[service("web")])
    assert directory.endpoints() == set()


def test_an_empty_slice_is_a_slice() -> None:
    directory = Directory(a=[endpoints("web", "10.1.0.9"), endpoint_slice("web")])
    assert directory.endpoints() == set()


OBJECTS: list[Json] = [
    service("web", port=1), service("web", port=2), service("web", ip="None"), service("other"),
    endpoint_slice("web", "10.1.0.1"), endpoint_slice("web", "10.1.0.2"),
    endpoint_slice("other", "10.1.0.3", name="web-1"), endpoint_slice("web", "10.1.0.4", name="web-2"),
    endpoints("web", "10.1.0.5"), endpoints("web", "10.1.0.6", "fd00::6"), endpoints("other"),
    node(NODE, "z1"), node("node2", "z2"),
    service_cidr("a", "10.96.0.0/12"), service_cidr("a", "fd00::/108"), service_cidr("b", "10.96.0.0/12"),
]
CHANGES = st.dictionaries(
    st.sampled_from("abc"), st.none() | st.lists(st.sampled_from(OBJECTS), max_size=4), max_size=3)


def outcome(directory: Directory) -> object:
    slices = {name: directory.endpoints(name) for name in ("web", "other")}
    return directory.store.services, slices, directory.store.service_cidrs


@given(st.lists(CHANGES, max_size=8))
def test_any_sequence_of_changes_ends_where_a_restart_would(history: list[Files]) -> None:
    walked = Directory()
    final: Files = {}
    for changes in history:
        walked.write(**changes)
        final |= changes
    assert outcome(walked) == outcome(Directory(**{name: found for name, found in final.items() if found}))


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.sampled_from(OBJECTS), max_size=4)))
def test_the_order_in_which_files_are_read_does_not_matter(files: dict[str, list[Json]]) -> None:
    wanted = outcome(Directory(**files))
    for names in itertools.permutations(files):
        one_by_one = Directory()
        for name in names:
            one_by_one.write(**{name: files[name]})
        assert outcome(one_by_one) == wanted


@pytest.mark.parametrize("count", [10, 1000])
def test_the_cost_of_a_change_is_that_of_its_objects(count: int) -> None:
    directory = Directory(**{f"f{i:04}": [service(f"s{i}", ip=f"10.96.{i // 250}.{i % 250 + 1}")]
                             for i in range(count)})
    assert len(directory.write(f0003=[service("s3", ip="10.96.0.4", port=81)])) == 1

"""When connections to removed endpoints are searched for and reset, and what is spared."""

import errno
from collections.abc import Collection
from queue import SimpleQueue

from kproxy_conformance.builders import destinations, endpoint_slice, service, service_name
from kproxy_core.contract.backend import Backend
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.values import Damage, IsRemoved, SyncReport, Update
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.resets import Pair
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.model.events import Event, ServiceGone, ServiceSet, SliceGone, SliceSet
from kproxy_core.model.service import Destination, ServicePortKey, SliceName
from kproxy_core.sync.node_facts import NodeSettings
from kproxy_core.sync.resets import ConnectionResets, ResetResult, frontend_of
from tests.core.loop_rig import V4, Clock, Rig
from tests.patience import PATIENCE

WEB = ServicePortKey("default", "web", "", Protocol.TCP)
VIP = parse_address("10.96.0.1"), 80
OTHER_VIP = parse_address("10.96.0.2"), 80
A, B = destinations("10.0.0.1:8080 10.0.0.2:8080")


def web(*endpoints: str, removed_endpoints: str = "reset") -> list[Event]:
    return [
        ServiceSet(service("web", removed_endpoints=removed_endpoints)),  # type: ignore[arg-type]
        SliceSet(endpoint_slice("web", *endpoints)),
    ]


class Kernel:
    """The connections and the table, as the observer sees them."""

    def __init__(self, *connections: Pair) -> None:
        self.connections = set(connections)
        self.table: frozenset[Pair] = frozenset()
        self.searched: list[frozenset[Destination] | None] = []
        """The endpoints of each search."""
        self.problem: HostError | None = None
        self.written = 0

    def find(
        self, family: Family, is_removed: IsRemoved, endpoints: Collection[Destination] | None
    ) -> set[Pair]:
        self.searched.append(None if endpoints is None else frozenset(endpoints))
        return {pair for pair in self.connections if is_removed(frontend_of(pair.dialled), pair.endpoint)}

    def read(self) -> frozenset[Pair]:
        return self.table

    def write(self, wanted: Collection[Pair]) -> None:
        self.written += 1
        if self.problem is not None:
            raise self.problem
        self.table = frozenset(wanted)

    def distrust(self) -> None:
        self.table = frozenset()


class Watched(Backend):
    """Holds what is reset at the time of each sync, and resets a connection of its own."""

    def __init__(self, kernel: Kernel) -> None:
        self.reset_during_sync: list[frozenset[Pair]] = []
        self.own = [(WEB, A)]
        self.problem: Exception | None = None
        self.closed = False
        self._kernel = kernel

    def sync(self, update: Update) -> SyncReport:
        self.reset_during_sync.append(self._kernel.table)
        if self.problem is not None:
            raise self.problem
        return SyncReport(len(update.changed))

    def watch(self, damaged: Damage) -> bool:
        return True

    def reset_connections(self, family: Family, is_removed: IsRemoved) -> int:
        if self.closed:
            raise SyncFailed("closed")
        reset = [each for each in self.own if is_removed(*each)]
        self.own = [each for each in self.own if each not in reset]
        return len(reset)


class Proxy:
    """A loop with the observer, whose thread does not run: `search` is its search."""

    def __init__(self, kernel: Kernel, *events: Event) -> None:
        self.kernel = kernel
        self.backend = Watched(kernel)
        self.told: list[ResetResult] = []
        self.rig = Rig(families=[V4], backend=self.backend, observers=self._observe)
        self.rig.start(*events)

    def _observe(self, clock: Clock) -> list[ConnectionResets]:
        self.resets = ConnectionResets(
            [V4], self.told.append, table=lambda _: self.kernel, find=self.kernel.find, clock=clock,
            start=lambda run: None)
        return [self.resets]

    def say(self, *events: Event) -> None:
        self.rig.say(*events)

    def search(self) -> ResetResult:
        """Search when that is due, and return the result."""
        due = self.resets.due(V4)
        assert due is not None
        self.rig.clock.now = max(due, self.rig.clock.now)
        self.resets._families[V4].due = None
        self.resets.search(V4)
        return self.told[-1]

    def rest(self) -> float | None:
        """Return the seconds until the next search."""
        due = self.resets.due(V4)
        return None if due is None else round(due - self.rig.clock.now, 3)


def settled(kernel: Kernel, *events: Event) -> Proxy:
    """A proxy whose search at the start has found nothing."""
    proxy = Proxy(kernel, *events)
    proxy.search()
    kernel.searched.clear()
    return proxy


def test_without_such_a_service_nothing_is_searched_for_or_written() -> None:
    kernel = Kernel(Pair(VIP, A))
    proxy = Proxy(kernel, *web("10.0.0.1", "10.0.0.2", removed_endpoints=""))
    proxy.say(*web("10.0.0.2", removed_endpoints=""))
    assert proxy.rest() is None
    assert kernel.searched == []
    assert kernel.written == 0


def test_connections_to_an_endpoint_that_left_are_reset_until_they_have_ended() -> None:
    kernel = Kernel(Pair(VIP, A), Pair(VIP, B), Pair(OTHER_VIP, A))
    proxy = settled(kernel, *web("10.0.0.1", "10.0.0.2"), ServiceSet(service("other", ip="10.96.0.2")),
                    SliceSet(endpoint_slice("other", "10.0.0.1")))
    proxy.say(*web("10.0.0.2"))
    assert proxy.rest() == 0.1
    assert proxy.search() == ResetResult(V4, pairs=1, reset=1, problem="")
    assert kernel.table == {Pair(VIP, A)}
    assert kernel.searched == [frozenset({A})]
    kernel.connections.discard(Pair(VIP, A))
    proxy.search()
    assert kernel.table == frozenset()
    assert proxy.rest() is None


def test_connections_that_go_on_are_looked_for_at_a_leisurely_pace() -> None:
    kernel = Kernel(Pair(VIP, A))
    proxy = settled(kernel, *web("10.0.0.1", "10.0.0.2"))
    proxy.say(*web("10.0.0.2"))
    proxy.search()
    assert proxy.rest() == 0.9, "a second look"
    proxy.search()
    assert proxy.rest() == 10.0


def test_an_endpoint_that_returns_is_spared_before_the_backend_is_told_of_it() -> None:
    kernel = Kernel(Pair(VIP, A))
    proxy = settled(kernel, *web("10.0.0.1", "10.0.0.2"))
    proxy.say(*web("10.0.0.2"))
    proxy.search()
    assert kernel.table
    proxy.say(*web("10.0.0.1", "10.0.0.2"))
    assert proxy.backend.reset_during_sync[-1] == frozenset()
    proxy.search()
    assert kernel.table == frozenset()


def test_an_endpoint_that_moves_from_one_slice_to_another_is_spared() -> None:
    kernel = Kernel(Pair(VIP, A))
    proxy = settled(kernel, *web("10.0.0.1", "10.0.0.2"))
    proxy.say(SliceGone(SliceName("default", "web-1")), SliceSet(endpoint_slice("web", "10.0.0.2")))
    proxy.say(SliceSet(endpoint_slice("web", "10.0.0.1", name="moved")))
    proxy.search()
    assert kernel.table == frozenset()
    assert proxy.backend.own


def test_while_syncs_fail_nothing_more_is_reset() -> None:
    kernel = Kernel(Pair(VIP, A))
    proxy = settled(kernel, *web("10.0.0.1", "10.0.0.2"))
    proxy.backend.problem = SyncFailed("busy")
    proxy.say(*web("10.0.0.2"))
    assert proxy.rest() is None
    proxy.backend.problem = None
    proxy.rig.settle()
    proxy.search()
    assert kernel.table == {Pair(VIP, A)}


def test_connections_of_a_deleted_service_are_kept() -> None:
    kernel = Kernel(Pair(VIP, A))
    proxy = settled(kernel, *web("10.0.0.1", "10.0.0.2"))
    proxy.say(*web("10.0.0.2"))
    proxy.search()
    proxy.say(ServiceGone(service_name("web")))
    assert kernel.table == frozenset()


def test_a_start_resets_connections_to_endpoints_that_left_meanwhile() -> None:
    kernel = Kernel(Pair(VIP, A), Pair(VIP, B), Pair(OTHER_VIP, A))
    proxy = Proxy(kernel, *web("10.0.0.2"))
    assert proxy.search().pairs == 1
    assert kernel.table == {Pair(VIP, A)}
    assert kernel.searched == [None]


def test_a_start_keeps_what_the_process_before_reset_and_spares_what_has_returned() -> None:
    kernel = Kernel(Pair(VIP, A), Pair(VIP, B))
    kernel.table = frozenset(kernel.connections)
    proxy = Proxy(kernel, *web("10.0.0.2"))
    assert proxy.backend.reset_during_sync == [{Pair(VIP, A)}]
    unset = Kernel()
    unset.table = frozenset({Pair(VIP, A)})
    Proxy(unset, *web("10.0.0.2", removed_endpoints="keep"))
    assert unset.table == frozenset()


def test_a_table_that_was_flushed_with_the_rules_is_written_again() -> None:
    kernel = Kernel(Pair(VIP, A))
    proxy = settled(kernel, *web("10.0.0.1", "10.0.0.2"))
    proxy.say(*web("10.0.0.2"))
    proxy.search()
    proxy.search()
    kernel.table = frozenset()
    proxy.rig.loop.post(lambda: proxy.rig.loop._syncs[V4].report_damage("flushed"))
    proxy.rig.turn()
    assert proxy.rest() == 0.1
    proxy.search()
    assert kernel.table == {Pair(VIP, A)}


def test_a_failed_change_is_told_and_tried_again() -> None:
    kernel = Kernel(Pair(VIP, A))
    proxy = settled(kernel, *web("10.0.0.1", "10.0.0.2"))
    proxy.say(*web("10.0.0.2"))
    kernel.problem = HostError("cannot change table ip kproxy-resets", OSError(errno.EPERM, ""))
    assert "Operation not permitted" in proxy.search().problem
    first = proxy.rest()
    proxy.search()
    second = proxy.rest()
    assert first is not None
    assert second is not None
    assert 0 < first < second
    kernel.problem = None
    assert proxy.search().problem == ""
    assert kernel.table == {Pair(VIP, A)}


def test_an_endpoint_that_could_not_be_spared_is_spared_soon() -> None:
    kernel = Kernel(Pair(VIP, A))
    proxy = settled(kernel, *web("10.0.0.1", "10.0.0.2"))
    proxy.say(*web("10.0.0.2"))
    proxy.search()
    proxy.search()
    kernel.problem = HostError("cannot change table ip kproxy-resets", OSError(errno.ENOBUFS, ""))
    proxy.say(*web("10.0.0.1", "10.0.0.2"))
    assert "No buffer space" in proxy.told[-1].problem
    kernel.problem = None
    rest = proxy.rest()
    assert rest is not None
    assert rest < 1
    proxy.search()
    assert kernel.table == frozenset()


def test_a_backend_that_retires_resets_its_connections_and_may_be_closed() -> None:
    kernel = Kernel()
    proxy = settled(kernel, *web("10.0.0.1", "10.0.0.2"))
    retiring, retiring_backend = proxy.rig.loop._instance, proxy.backend
    proxy.backend = Watched(kernel)
    proxy.rig.serve_with(proxy.backend, NodeSettings(name="node1"))
    proxy.say(*web("10.0.0.2"))
    assert proxy.search().reset == 2
    assert retiring_backend.own == []
    retiring_backend.closed = True
    proxy.search()
    assert proxy.told[-1].problem == ""
    proxy.backend.closed = True
    proxy.say(*web("10.0.0.3"))
    assert proxy.search().problem == "closed"
    assert retiring.mode == "test"


def test_a_thread_searches_while_there_is_something_to_search_for() -> None:
    kernel = Kernel(Pair(VIP, A))
    told: SimpleQueue[ResetResult] = SimpleQueue()
    resets = ConnectionResets([V4], told.put, table=lambda _: kernel, find=kernel.find)
    rig = Rig(families=[V4], backend=Watched(kernel), observers=lambda _: [resets])
    rig.start(*web("10.0.0.2"))
    assert told.get(timeout=PATIENCE).pairs == 1
    kernel.connections.clear()

"""The stage of a contract check: the backend alone in an empty network namespace."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from kproxy_conformance.checks import kernel_state
from kproxy_conformance.checks.check import Check, Failed, NotApplicable
from kproxy_conformance.checks.features import ADDRESSES, Plans
from kproxy_conformance.checks.kernel_state import KernelState, difference
from kproxy_conformance.checks.subject import Subject, Wanted, full
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.network.dialing import wait_until
from kproxy_conformance.network.namespaces import Namespace, run
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView


class Bench:
    """One subject in the calling thread's network namespace."""

    def __init__(self, subject: Subject, family: Family | None) -> None:
        self.subject = subject
        self._family = family
        self.wanted = subject.wanted
        self._kernel = kernel_state.Reader(self.wanted.state)
        self.untouched = self.state()
        """The kernel's state before the backend changed anything."""
        self._links = kernel_state.links()

    @property
    def family(self) -> Family:
        if self._family is None:
            raise TypeError("this check is asked about both families")
        return self._family

    def state(self) -> KernelState:
        return self._kernel.read()

    def destroy(self) -> None:
        """Destroy everything that the backend programmed. Raises NotApplicable if the kit cannot reach it."""
        before = self.state()
        new = sorted(kernel_state.links() - self._links)
        kernel_state.destroy(new, self.wanted.damage)
        if self.state() == before:
            raise NotApplicable(
                "the kit cannot damage this backend's state; see kproxy_damage in its ini file"
            )
        prepare(self.wanted)

    def started(self, plans: Plans, family: Family | None = None) -> BackendInstance:
        """Return a backend that has programmed *plans*."""
        instance = self.subject.start()
        full(instance, family or self.family, plans)
        return instance

    def same(self, before: KernelState, what: str) -> None:
        """Fail unless the kernel's state equals *before*."""
        if changes := difference(before.lines, self.state().lines):
            raise Failed(f"{what}:\n{changes}")

    def unwritten(self, commits: int, what: str) -> None:
        """Fail if nf_tables was written since it had *commits*, even if that changed nothing."""
        if written := kernel_state.commits() - commits:
            raise Failed(f"{what}: {written} commits to nf_tables")

    def as_much(self, before: KernelState, what: str) -> None:
        """Fail unless as many objects are in use as *before*; numbers and addresses do not matter."""
        if changes := difference(before.shape, self.state().shape):
            raise Failed(f"{what}:\n{changes}")

    def settled(
        self, instance: BackendInstance, plans: Plans, what: str, node: NodeView | None = None
    ) -> None:
        """Fail if a full sync with *plans* finds differences."""
        before = self.state()
        full(instance, self.family, plans, node)
        if changes := difference(before.in_use, self.state().in_use):
            raise Failed(
                f"{what} did not end where a full sync with the same plans ends, which changed:\n{changes}"
            )


@contextlib.contextmanager
def bench(
    wanted: Wanted, family: Family | None, families: tuple[Family, ...] = tuple(Family)
) -> Iterator[Bench]:
    """Yield a bench on a new node, and move the calling thread there for the ``with`` block."""
    with lonely_node(wanted.cgroup):
        prepare(wanted)
        subject = Subject(wanted, families)
        subject.end_all()
        try:
            yield Bench(subject, family)
        finally:
            subject.end_all()


@contextlib.contextmanager
def lonely_node(cgroup: NodeCgroup | None = None) -> Iterator[None]:
    """Move the calling thread to a new node that has its addresses and no network."""
    node = Namespace("node", cgroup)
    four, six = (ADDRESSES[family].node for family in Family)
    try:
        node.add_address(f"{four}/32", "lo")
        node.add_address(f"{six}/128", "lo")
        with node.entered():
            routes, address = Path("/proc/net/ipv6_route"), socket.inet_pton(socket.AF_INET6, six).hex()
            # The route to it, and the local one, which the kernel adds a moment later.
            wait_until(lambda: routes.read_text(encoding="ascii").count(address) >= 2, 1, 0.001)
            yield
    finally:
        node.close()


def prepare(wanted: Wanted) -> None:
    """Create the kernel objects of other programs that the backend expects."""
    for command in wanted.node:
        run("sh", "-c", command)


def run_check(check: Check, wanted: Wanted, family: Family | None) -> None:
    with bench(wanted, family) as prepared:
        check.run(prepared)

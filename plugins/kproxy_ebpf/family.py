"""One family's elements of the maps, and the steps that bring them to the plans."""

from kproxy_core.backend.api import Scope, Update
from kproxy_core.backend.errors import TrustLost
from kproxy_core.model.address import Family
from kproxy_ebpf import names
from kproxy_ebpf.applied import Applied, Difference, compare, contents
from kproxy_ebpf.kernel.port import Kernel
from kproxy_ebpf.wanted import node_addresses


class FamilyState:
    """The elements of one family in the maps, as acknowledged by the kernel."""

    def __init__(self, family: Family, kernel: Kernel) -> None:
        self._family = family
        self._kernel = kernel
        self._applied: Applied | None = None
        """None: only a resync will do."""
        self._node_addresses: dict[bytes, bytes] = {}

    def withdraw(self, update: Update) -> Difference:
        """Remove what must not be chosen any more, before the rules change. `write` does the rest.

        Raises SyncFailed, TrustLost.
        """
        if update.scope is Scope.RESYNC:
            self._applied = None
            actual = self._kernel.contents(self._family)
            self._node_addresses = actual.pop(names.NODE_ADDRESSES)
            difference = compare(actual, contents(update.plans.values()))
        elif self._applied is None:
            raise TrustLost("the maps have not been read yet")
        else:
            difference = self._applied.difference(update.changed)
        self._kernel.withdraw(difference)
        return difference

    def write(self, update: Update, difference: Difference) -> int:
        """Add what may be chosen from now on. Return the number of elements written and deleted.

        Raises TrustLost.
        """
        self._kernel.configure(update.node)
        wanted = node_addresses(update.node)
        operations = self._kernel.replace(names.NODE_ADDRESSES, self._node_addresses, wanted)
        self._kernel.write(difference)
        if self._applied is None:
            self._applied = Applied(update.plans)
        else:
            self._applied.acknowledge(update.changed)
        self._node_addresses = wanted
        if update.scope is Scope.RESYNC or difference.withdrawn[names.ENDPOINTS]:
            # Their clients connect again, and what they find by then is complete.
            self._kernel.destroy_connected_sockets()
        return operations + difference.operations

    def distrust(self) -> None:
        """Discard what was acknowledged: a write failed half-way."""
        self._applied = None

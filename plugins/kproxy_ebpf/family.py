"""Map elements of one IP family, and the steps that bring them to the plans."""

from collections.abc import Mapping
from itertools import islice

from kproxy_core.contract import Family, Scope, ServicePlan, ServicePortKey, SyncFailed, Update
from kproxy_ebpf import names
from kproxy_ebpf.applied import Applied, Contents, Difference, compare, contents
from kproxy_ebpf.kernel.maps import Kernel
from kproxy_ebpf.wanted import of_node

_PART = 1000
"""Number of plans whose elements are written at a time."""


class FamilyState:
    """The elements of one family in the maps, as acknowledged by the kernel."""

    def __init__(self, family: Family, kernel: Kernel) -> None:
        self._family = family
        self._kernel = kernel
        self._applied: Applied | None = None
        """None: the maps must be read."""
        self._of_node: Contents = {name: {} for name in names.OF_NODE}

    def withdraw(self, update: Update) -> Difference | None:
        """Remove endpoints that must not be chosen any more, before the rules change. `write` does the rest.

        Read the maps first if their content is unknown. Return the difference, or None if the maps are empty.
        Raises SyncFailed, TrustLost.
        """
        if update.scope is Scope.RESYNC or self._applied is None:
            self._applied = None
            actual = self._kernel.contents(self._family)
            self._of_node = {name: actual.pop(name) for name in names.OF_NODE}
            if not any(actual.values()):
                return None
            difference = compare(actual, contents(update.plans.values()))
        else:
            difference = self._applied.difference(update.changed)
        self._kernel.withdraw(difference)
        return difference

    def write(self, update: Update, difference: Difference | None) -> int:
        """Add endpoints that may be chosen from now on. Return the number of elements written and deleted.

        Raises TrustLost.
        """
        self._kernel.configure(update.node)
        wanted = of_node(update)
        operations = sum(
            self._kernel.replace(name, self._of_node[name], wanted[name]) for name in names.OF_NODE)
        if difference is None:
            operations += self._fill(update.plans)
        else:
            self._kernel.write(difference)
            operations += difference.operations
        were_read = self._applied is None
        if self._applied is None:
            self._applied = Applied(update.plans)
        else:
            self._applied.acknowledge(update.changed)
        self._of_node = wanted
        if difference is None or were_read or difference.withdrawn[names.ENDPOINTS]:
            # Their clients reconnect when the maps are complete.
            self._kernel.destroy_connected_sockets()
        return operations

    def _fill(self, plans: Mapping[ServicePortKey, ServicePlan]) -> int:
        """Write the elements of all *plans* in parts, to save memory. Return their number."""
        rest, operations = iter(plans.values()), 0
        while part := list(islice(rest, _PART)):
            difference = compare({}, contents(part))
            self._kernel.write(difference)
            operations += difference.operations
        return operations

    def restore(self, difference: Difference | None) -> None:
        """Undo `withdraw`: the rules did not change."""
        try:
            if difference is not None:
                self._kernel.restore(difference)
        except SyncFailed:
            self.distrust()

    def distrust(self) -> None:
        """Discard the acknowledged state: a write failed half-way."""
        self._applied = None

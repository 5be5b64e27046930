"""Serves the hook `kproxy_preview`: the difference between the kernel and the plans, as text."""

from collections.abc import Iterator

from kproxy_core.backend.api import Preview, Update
from kproxy_core.model.address import Family
from kproxy_ipvs import skeleton
from kproxy_ipvs.applied import Applied, Difference, compare_all, foreign_servers
from kproxy_ipvs.batch import rules as rules_batch
from kproxy_ipvs.batch import sets as sets_batch
from kproxy_ipvs.inspection.render import CREATE_DEVICE, addresses_text, servers_text
from kproxy_ipvs.kernel import device, sets
from kproxy_ipvs.kernel.virtual_servers import VirtualServers
from kproxy_ipvs.names import SETS, SetKind
from kproxy_ipvs.settings import Settings
from kproxy_ipvs.wanted import make_style
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import PROGRAM, find_variant


def preview(update: Update, settings: Settings) -> Preview:
    """Return the operations of a resync. Raises HostError, or NoVariant without iptables."""
    family, node = update.family, update.node
    entries = sets.read(family)
    missing = [kind for kind in SETS if kind not in entries]
    on_device, elsewhere = device.read(family)
    expected = Applied.after(update.plans, make_style(node, settings.scheduler, elsewhere))
    with VirtualServers() as servers:
        held = servers.read(family)
    foreign = foreign_servers(held, on_device, entries, settings.exclude_cidrs, node.masquerade_bit)
    difference = compare_all(expected, held, entries, on_device, foreign)
    text = rules_batch.difference(Tables(family, find_variant()).chains(), skeleton.skeleton(node))
    no_device = not device.exists()
    operations = difference.operations + len(missing) + no_device + text.count("\n-") + text.count("\n:")
    return Preview(operations, "".join(_texts(family, difference, missing, text, no_device=no_device)))


def _texts(
    family: Family, difference: Difference, missing: list[SetKind], rules_text: str, *, no_device: bool
) -> Iterator[str]:
    """Yield the operations in the order of a sync."""
    if missing or difference.adds:
        yield "# ipset restore\n" + sets_batch.render(family, missing, sorted(difference.adds))
    if rules_text:
        yield f"# {PROGRAM[family]}-restore --noflush\n{rules_text}"
    if difference.servers:
        yield "# ipvsadm --restore\n" + servers_text(difference.servers)
    if no_device or difference.bind:
        yield "# ip -batch\n" + CREATE_DEVICE * no_device + addresses_text("add", difference.bind, family)
    if difference.deleted:
        yield "# ipvsadm --restore\n" + servers_text(difference.deleted)
    if difference.unbind:
        yield "# ip -batch\n" + addresses_text("del", difference.unbind, family)
    if difference.deletes:
        yield "# ipset restore\n" + "".join(
            f"del {kind.full_name(family)} {entry}\n" for kind, entry, _ in sorted(difference.deletes))

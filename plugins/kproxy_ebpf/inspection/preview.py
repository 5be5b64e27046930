"""Serves the hook `kproxy_preview`: the difference between maps and plans, and the tables of ``notrack``."""

from collections.abc import Iterator, Mapping

from kproxy_core.backend.api import Preview, Update
from kproxy_ebpf import names
from kproxy_ebpf.applied import Contents, compare, contents
from kproxy_ebpf.kernel.notrack import planned_commands
from kproxy_ebpf.kernel.pinned import pinned_maps
from kproxy_ebpf.settings import Settings
from kproxy_ebpf.wanted import node_addresses


def preview(update: Update, settings: Settings) -> Preview:
    """Return the rules of ``notrack``, and the operations on the maps as comments. Raises SyncFailed."""
    with pinned_maps(settings) as maps:
        actual: Contents = {} if maps is None else maps.contents(update.family)
    held, wanted = actual.pop(names.NODE_ADDRESSES, {}), node_addresses(update.node)
    difference = compare(actual, contents(update.plans.values()))
    addresses = {key: value for key, value in wanted.items() if held.get(key) != value}
    gone = {key: value for key, value in held.items() if key not in wanted}
    lines = [
        *_lines("delete", {**difference.withdrawn, names.NODE_ADDRESSES: gone}),
        *_lines("update", {**difference.updates, names.NODE_ADDRESSES: addresses}),
        *_lines("delete", difference.unused),
    ]
    rules = planned_commands(update.family, settings.notrack_mark)
    return Preview(difference.operations + len(addresses) + len(gone), rules + "".join(lines))


def _lines(command: str, contents: Mapping[str, Mapping[bytes, bytes]]) -> Iterator[str]:
    for name, elements in contents.items():
        for key, value in elements.items():
            text = f"key hex {key.hex(' ')}" + (f" value hex {value.hex(' ')}" if command == "update" else "")
            yield f"# bpftool map {command} name {names.OBJECT_PREFIX}{name} {text}\n"

"""Removes the mode's links, programs, maps and tables of this network namespace."""

import shutil

from kproxy_core.backend.api import BackendSettings, Leftovers
from kproxy_core.backend.errors import BackendError
from kproxy_ebpf import names
from kproxy_ebpf.kernel.notrack import delete_tables
from kproxy_ebpf.kernel.port import detach_pins, pins_of
from kproxy_ebpf.settings import read_settings


def cleanup(settings: BackendSettings, *, dry_run: bool) -> Leftovers:
    """Detach all programs and remove all pins and tables, or say what would be removed."""
    try:
        home = pins_of(read_settings(settings))
        removed = delete_tables(dry_run=dry_run)
        if not home.exists():
            return Leftovers(names.MODE, tuple(removed))
        removed += [f"BPF pin {path}" for path in sorted(home.rglob("*")) if path.is_file()]
        if not dry_run:
            detach_pins(home / "links", names.KINDS)
            shutil.rmtree(home)
    except (OSError, BackendError) as error:
        return Leftovers(names.MODE, errors=(str(error),))
    return Leftovers(names.MODE, tuple(removed))

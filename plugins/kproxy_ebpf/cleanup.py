"""Removal of the mode's links, programs, maps and tables of this network namespace, and retirement."""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress

from kproxy_core.contract import BackendError, BackendSettings, Leftovers
from kproxy_ebpf import names
from kproxy_ebpf.kernel.maps import delete_tables, detach_pins, forget_connections, pins_of
from kproxy_ebpf.settings import read_settings


def cleanup(settings: BackendSettings, *, dry_run: bool) -> Leftovers:
    """Detach all programs and remove all pins and tables, or say what would be removed."""
    try:
        home = pins_of(read_settings(settings))
        removed = delete_tables(dry_run=dry_run)
        if not home.exists():
            return Leftovers(tuple(removed))
        removed += [f"BPF pin {path}" for path in sorted(home.rglob("*")) if path.is_file()]
        if not dry_run:
            detach_pins(home / "links", names.KINDS)
            shutil.rmtree(home)
    except (OSError, BackendError) as error:
        return Leftovers(errors=(str(error),))
    return Leftovers(tuple(removed))


# Retirement.

GRACE = 5.0
"""Seconds in which late replies to datagrams still get the address of the dialled frontend."""

_since: dict[str, float] = {}
"""Time at which the programs of a directory stopped choosing endpoints, on the monotonic clock."""


def retire(settings: BackendSettings, clock: Callable[[], float] = time.monotonic) -> Leftovers:
    """Stop choosing endpoints at once; translate replies for a grace period.

    Established TCP connections need nothing of this mode; untracked ones are tracked from now on.
    """
    try:
        home = pins_of(read_settings(settings))
        pins = detach_pins(home / "links", (*names.ON_THE_WAY_OUT, *names.COUNTING))
        tables = delete_tables()
        if pins:
            _since[str(home)] = clock()
            with suppress(PermissionError):  # No bpf(2) here: a clean-up removes the map.
                forget_connections(home)
    except (OSError, BackendError) as error:
        return Leftovers(errors=(str(error),))
    in_grace = clock() - _since.get(str(home), -GRACE) < GRACE
    return Leftovers((*(f"BPF pin {path}" for path in pins), *tables), in_grace=in_grace)

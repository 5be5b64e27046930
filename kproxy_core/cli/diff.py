"""``kproxy diff``."""

from collections.abc import Mapping, Sequence
from typing import Any

from kproxy_core.app.control import send_request
from kproxy_core.cli.options import OBJECTS
from kproxy_core.cli.terminal import bad, good, hint
from kproxy_core.config.flags import Flags

SAME, DIFFERENT, UNCLEAR = 0, 1, 2
"""Exit status."""

Found = Mapping[str, Any]


def compare(flags: Flags) -> Found:
    """Return the mode and the differences.

    With objects in *flags*, this process reads the kernel; else the running proxy does. Raises NoProxy,
    RequestRefused or NoAnswer, and as `cli_errors` expects.
    """
    if not OBJECTS & set(flags):
        return send_request({"do": "diff"})
    from kproxy_core.app.answers import compare_all
    from kproxy_core.cli.objects import read_objects

    with read_objects(flags, this_machine=True) as (plans, registry, instance, settings_of, *_):
        return {"mode": instance.mode, "differences": compare_all(plans, registry, instance, settings_of)}


def status_of(found: Found) -> int:
    kinds = {difference["kind"] for difference in found["differences"]}
    if not kinds:
        return SAME
    return UNCLEAR if kinds == {"unclear"} else DIFFERENT


def as_text(found: Found) -> str:
    differences: Sequence[Mapping[str, Any]] = found["differences"]
    if not differences:
        return good(f"the kernel does what the plans say ({found['mode']})")
    return "\n".join(map(_line, differences))


def _line(difference: Mapping[str, Any]) -> str:
    style = hint if difference["kind"] == "unclear" else bad
    of = f" of {difference['service_port']}" if difference["service_port"] else ""
    senders = difference["senders"]
    whom = f" (packets from {', '.join(senders)})" if senders and len(senders) < 3 else ""
    return f"{difference['frontend']}{of}: {style(difference['difference'])}{whom}"

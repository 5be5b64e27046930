"""What ``kproxy switch`` prints."""

from collections.abc import Callable, Mapping
from typing import Any

from kproxy_core.modes import control


def check(mode: str, say: Callable[[str], None]) -> bool:
    """Say what would change with *mode*. True if nothing would be lost.

    Raises RequestRefused or NoProxy.
    """
    found = control.send_request({"do": "compare", "mode": mode}, say)
    now = found["mode"]
    if now == mode:
        say(f"{mode} serves already")
        return True
    if not found["appearing"] and not found["disappearing"]:
        say(f"nothing changes for this node's Services between {now} and {mode}")
    for caveat in found["appearing"]:
        say(f"{'lost' if caveat['lost'] else 'differs'}: {_described(caveat)}")
    for caveat in found["disappearing"]:
        say(f"{'lost' if caveat['only_here'] else 'gone'} with {now}: {_described(caveat)}")
    return not found["loses"]


def switch(mode: str, say: Callable[[str], None]) -> None:
    """Have the running proxy switch to *mode*, saying how far it is. Raises RequestRefused or NoProxy."""
    done = control.send_request({"do": "switch", "mode": mode}, say)
    if done["configured"] != mode:
        named = f"mode {done['configured']!r}" if done["configured"] else "no mode"
        say(f"the configuration has {named}: put {mode!r} there to keep it after a reboot")


def _described(caveat: Mapping[str, Any]) -> str:
    return f"{caveat['service_port']}: {caveat['what']}" if caveat["service_port"] else str(caveat["what"])

"""Small things done to a good backend, each of which one check of the kit must notice."""

from tests.kit.contract_sabotages import MORE_QUESTIONS, QUESTIONS, SYNCS
from tests.kit.packet_sabotages import MORE_PACKETS, PACKETS
from tests.kit.sabotage import Sabotage

GROUPS = {
    "contract": (QUESTIONS, MORE_QUESTIONS, SYNCS),
    "packets": (PACKETS, MORE_PACKETS),
}
"""Those of a group are done together: no two are noticed by the same check."""

BY_NAME = {str(sabotage): sabotage for parts in GROUPS.values() for part in parts for sabotage in part}


def __getattr__(name: str) -> Sabotage:
    """Each under its name, so that a process of its own can load it as well."""
    found = BY_NAME.get(name.removeprefix("do_"))
    if found is None:
        raise AttributeError(name)
    found.be_loaded()
    return found

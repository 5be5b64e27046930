"""Small things done to a good backend, each of which a check of the contract or a scenario must notice."""

from tests.kit.contract_sabotages import MORE_QUESTIONS, QUESTIONS, SYNCS
from tests.kit.sabotage import Sabotage
from tests.kit.scenario_sabotages import SCENARIOS

CONTRACT = (QUESTIONS, MORE_QUESTIONS, SYNCS)
"""Those of a group are done together: no two are noticed by the same check."""

BY_NAME = {
    str(sabotage): sabotage for part in (*CONTRACT, SCENARIOS) for sabotage in part
}


def __getattr__(name: str) -> Sabotage:
    """Each under its name, so that a process of its own can load it as well."""
    found = BY_NAME.get(name.removeprefix("do_"))
    if found is None:
        raise AttributeError(name)
    found.be_loaded()
    return found

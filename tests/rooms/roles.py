"""The table role x plugin in ARCHITECTURE.md, made from the modules that exist.

``python -m tests.rooms.roles`` prints it.
"""

from tests.rooms import rules
from tests.rooms.modules import modules_of_plugins

MEANINGS = {
    "hooks": "the hooks that the core calls; imports nothing heavy",
    "settings": "the mode's options, read and checked",
    "backend": "the instance that serves",
    "family": "`FamilyState`: the known kernel state of an IP family, and the steps to the plans",
    "names": "names of kernel objects",
    "skeleton": "the constant rules",
    "wanted": "the kernel objects that a plan wants",
    "applied": "the acknowledged state, and its difference to the wanted one",
    "batch": "operations, encoded",
    "kernel": "input and output",
    "watch": "notices changes by other processes",
    "detect": "tries the requirements of the mode",
    "cleanup": "removes every trace",
    "retire": "keeps what connections need while another mode takes over",
    "render": "the rules as text, and the operations of the next sync",
    "explain": "the kernel objects that a packet meets",
    "traffic": "counts of connections",
    "metrics": "metrics of the mode's own",
}
"""What each module of a backend is for, in the order of the table."""


def table() -> list[str]:
    """Return the lines of the table."""
    backends = [f"kproxy_{backend}" for backend in rules.BACKENDS]
    has = {(module.top, module.room) for module in modules_of_plugins()}
    lines = [f"| module | role | | {' | '.join(rules.BACKENDS)} |", f"|---|---|---|{':-:|' * len(backends)}"]
    for role, meaning in MEANINGS.items():
        marks = " | ".join("x" if (backend, role) in has else " " for backend in backends)
        lines.append(f"| `{role}` | {meaning} | {_kind(role)} | {marks} |")
    return lines


def without_a_meaning() -> set[str]:
    """Return the modules of backends that `MEANINGS` leaves out."""
    return {
        module.room for module in modules_of_plugins() if module.top not in rules.SHARED_BY_PLUGINS
    } - {"", *MEANINGS}


def _kind(role: str) -> str:
    if role in rules.PURE_MODULES:
        return "pure"
    return "acts" if role in {*rules.ACTING_MODULES, "hooks"} else ""


if __name__ == "__main__":
    print(*table(), sep="\n")

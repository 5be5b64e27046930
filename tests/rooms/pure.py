"""The test modules that start nothing: `make check` runs all of them, without a list that has to be kept."""

import ast
from collections.abc import Mapping
from functools import cache

from tests.rooms.modules import CHECKOUT, Module, load, modules_of_kit

STARTS_SOMETHING = frozenset(
    {"asyncio", "ctypes", "http", "kubernetes", "pyroute2", "socket", "socketserver", "ssl", "subprocess",
     "threading", "urllib"}
)  # fmt: skip
"""Modules for processes, threads and sockets."""
NAMESPACES = frozenset({"netns", "node"})
"""Fixtures that make them."""


_OURS = ("tests.", "kproxy_conformance.")


@cache
def modules() -> Mapping[str, Module]:
    """Return the modules of the tests and of `kproxy_conformance` by name."""
    found = (*load(CHECKOUT, "tests"), *modules_of_kit())
    return {module.name: module for module in found if module.name.startswith(_OURS)}


@cache
def is_pure(name: str) -> bool:
    """Return whether neither the module *name* nor one of `modules` that it imports starts anything."""
    module = modules().get(name)
    if module is None or NAMESPACES & set(_arguments_of_tests(module)):
        return False
    for imported in module.imports():
        if imported.top in STARTS_SOMETHING:
            return False
        if imported.module.startswith(_OURS):
            found = imported.module if imported.module in modules() else imported.module.rpartition(".")[0]
            if found != name and not is_pure(found):
                return False
    return True


def _arguments_of_tests(module: Module) -> list[str]:
    return [
        argument.arg
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for argument in node.args.args
    ]

"""The modules of this checkout as syntax trees: what each imports, and the strings and names it uses."""

import ast
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Import:
    """One imported module, as written or as resolved from a relative import."""

    module: str
    line: int
    bound: str = ""
    """The name that it has in the importing module."""

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def room(self) -> str:
        """The second part of the name, as in `Module.room`."""
        return [*self.module.split("."), ""][1]

    @property
    def from_standard_library(self) -> bool:
        return self.top in sys.stdlib_module_names


@dataclass(frozen=True)
class Module:
    """One source file. `name` is its import name, a package's ``__init__`` included as the package."""

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def room(self) -> str:
        """The second part of the name: ``plan`` of ``kproxy_core.plan.fate``; "" of the package itself.

        The kit is one room, ``kit``.
        """
        return "kit" if self.top == "kproxy_conformance" else [*self.name.split("."), ""][1]

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def lines(self) -> int:
        return self.source.count("\n")

    def imports(self) -> Iterator[Import]:
        """Everything imported anywhere in the file, in functions and for type checking only too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, node.lineno, alias.asname or "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from self._imported_from(node)
            elif isinstance(node, ast.Call) and (name := _imported_by_call(node)):
                yield Import(name, node.lineno)

    def _imported_from(self, node: ast.ImportFrom) -> Iterator[Import]:
        base = node.module or ""
        if node.level:
            keep = len(self.name.split(".")) - node.level + (1 if self.is_package else 0)
            base = ".".join([*self.name.split(".")[:keep], *([base] if base else [])])
        # "from package import thing": the thing may be a module, so its full name is given.
        yield from (Import(f"{base}.{alias.name}", node.lineno, alias.asname or alias.name)
                    for alias in node.names)

    def words(self) -> Iterator[tuple[str, int]]:
        """Strings and names that the code uses, without docstrings and comments."""
        prose = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(self.tree):
            match node:
                case ast.Constant(value=str(text)) if id(node) not in prose:
                    yield text, node.lineno
                case ast.Constant(value=bytes(text)):
                    yield text.decode(errors="replace"), node.lineno
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    yield name, node.lineno
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    yield name, node.lineno
                case ast.arg(arg=name):
                    yield name, node.lineno
                case ast.keyword(arg=str(name)):
                    yield name, node.value.lineno


def _imported_by_call(node: ast.Call) -> str:
    """The module that ``import_module("x")`` or ``__import__("x")`` names; "" for other calls."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
        return str(node.args[0].value)
    return ""


def load(root: Path, package: str) -> list[Module]:
    """Every module of the package *package* that lies in *root*."""
    modules = []
    for path in sorted((root / package).rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return modules


def modules_of_core() -> list[Module]:
    return load(CHECKOUT, "kproxy_core")


def modules_of_kit() -> list[Module]:
    return load(CHECKOUT / "conformance", "kproxy_conformance")


def modules_of_plugins() -> list[Module]:
    root = CHECKOUT / "plugins"
    packages = sorted(path.name for path in root.iterdir() if (path / "__init__.py").exists())
    return [module for package in packages for module in load(root, package)]


def modules_of_tests() -> list[Module]:
    return [module for module in load(CHECKOUT, "tests") if module.last.startswith("test_")]


def circles(modules: Sequence[Module]) -> list[list[str]]:
    """Return the groups of *modules* that import each other, in functions and for type checking too."""
    names = {module.name for module in modules if not module.is_package}
    reached = {
        module.name: {_module_of(imported, names) for imported in module.imports()} - {""}
        for module in modules if not module.is_package
    }  # fmt: skip
    for middle in names:  # Warshall's algorithm
        for behind in reached.values():
            if middle in behind:
                behind |= reached[middle]
    in_circles = [name for name in names if name in reached[name]]
    return sorted(map(sorted, {
        frozenset(other for other in reached[name] if name in reached[other]) for name in in_circles}))


def _module_of(imported: Import, names: Collection[str]) -> str:
    """Return the one of *names* from which something is imported; "" if there is none."""
    for name in (imported.module, imported.module.rpartition(".")[0]):
        if name in names:
            return name
    return ""

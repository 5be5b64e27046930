"""What plugins may import, read from the source: printed for the page, and compared between two commits.

    python -m tests.rooms.surface              the list of docs/writing-a-backend.md
    python -m tests.rooms.surface REV [REV]    what changed since the first, up to the second or this checkout

The exit status is 1 if a plugin that was written for the first may fail with the second, unless the major
number of the contract rose. None of the compared code is imported.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

from kproxy_core.contract import __all__
from kproxy_core.contract.public import PUBLIC
from tests.rooms.modules import CHECKOUT, Module

CONTRACT = "kproxy_core.contract"
HOOKS = f"{CONTRACT}.hooks"

Source = Callable[[str], str | None]
"""Returns the text of a file of one tree by its path; None: there is none."""


def directory(root: Path) -> Source:
    """Return the source of the files that lie in *root*."""

    def read(path: str) -> str | None:
        return (root / path).read_text(encoding="utf-8") if (root / path).is_file() else None

    return read


def commit(revision: str, repository: Path) -> Source:
    """Return the source of the tree of *revision*. Raises ValueError if there is none."""

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(repository), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else None

    if git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}") is None:
        raise ValueError(f"{revision!r} is no commit")
    return cache(lambda path: git("show", f"{revision}:{path}"))


# One tree: its names, and what each is.

@dataclass(frozen=True)
class Parameter:
    """A parameter of a function, or a field that is one of the constructor's."""

    name: str
    kind: str
    """``positional``, ``either``, ``keyword``, ``*`` or ``**``."""
    type: str
    default: str | None
    """None: it must be given."""

    def __str__(self) -> str:
        stars = self.kind if "*" in self.kind else ""
        default = "" if self.default is None else f" = {self.default}"
        return f"{stars}{self.name}: {self.type or 'unknown'}{default}"


@dataclass(frozen=True)
class Thing:
    """A public name."""

    kind: str
    """``function``, ``hook``, ``class``, ``enum``, ``property`` or ``value``."""
    type: str = ""
    """What a function returns, a property or a value is; the literal or the type that a value stands for."""
    parameters: tuple[Parameter, ...] = ()
    """Those of a function, or the fields of a class."""
    bases: tuple[str, ...] = ()
    members: Mapping[str, "Thing"] = field(default_factory=dict)
    """Methods, properties and values of a class; the members of an enum."""
    must_have: str = ""
    """Methods that an implementation needs: the ``abstract`` ones of a base class, ``all`` of a protocol."""


class Tree:
    """The modules of one tree."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = name.replace(".", "/")
            for file, is_package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
                if (text := self._source(file)) is not None:
                    self._modules[name] = Module(name, text, is_package)
                    break
            else:
                self._modules[name] = None
        return self._modules[name]

    @property
    def version(self) -> tuple[int, int]:
        """The pair CONTRACT; (0, 0) in a tree without a contract."""
        major, minor = self._literal(f"{CONTRACT}.values", "CONTRACT", (0, 0))
        return major, minor

    @property
    def public(self) -> dict[str, tuple[str, ...]]:
        """The names that plugins may import, by module."""
        listed = self._literal(f"{CONTRACT}.public", "PUBLIC", {})
        return {CONTRACT: tuple(self._literal(CONTRACT, "__all__", ())), **listed}

    def things(self) -> dict[str, Thing]:
        """Return every public name with its module, and every hook."""
        found = {f"{module}.{name}": self.thing(module, name)
                 for module, names in self.public.items() for name in names}
        if (version := f"{CONTRACT}.CONTRACT") in found:
            found[version] = Thing("value")  # It rises with what changes; see `verdict`.
        hooks = self.module(HOOKS)
        for node in hooks.tree.body if hooks is not None else ():
            if isinstance(node, ast.FunctionDef) and node.name.startswith("kproxy_"):
                found[f"hook {node.name}"] = _function(node, "hook")
        return found

    def purpose(self, module: str) -> str:
        """Return the first sentence of the docstring of *module*, without its sources."""
        found = self.module(module)
        text = (ast.get_docstring(found.tree) or "") if found is not None else ""
        line = re.sub(r" \([^()]*/[^()]*\)", "", " ".join(text.split("\n\n")[0].split()))
        return line.partition(". ")[0].rstrip(".")

    def thing(self, module: str, name: str) -> Thing:
        """Return what *name* is in *module*, where it may be imported from another. Raises LookupError."""
        found = self._definition(module, name)
        if found is None:
            raise LookupError(f"{module} has no {name}, which the list of public names has")
        where, node = found
        match node:
            case ast.FunctionDef():
                return _function(node, "function")
            case ast.ClassDef():
                return self._class(where, node)
            case ast.AnnAssign(annotation=annotation, value=value):
                return Thing("value", f"{ast.unparse(annotation)} = {_shown(value)}")
            case ast.Assign(value=value):
                return Thing("value", _shown(value))
        return Thing("value")

    def _definition(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        found = self.module(module)
        for node in found.tree.body if found is not None else ():
            match node:
                case ast.FunctionDef(name=bound) | ast.ClassDef(name=bound) if bound == name:
                    return module, node
                case ast.AnnAssign(target=ast.Name(id=bound)) if bound == name:
                    return module, node
                case ast.Assign(targets=targets) if name in _bound(targets):
                    return module, node
                case ast.ImportFrom(module=str(source), names=names, level=0):
                    for alias in names:
                        if (alias.asname or alias.name) == name:
                            return self._definition(source, alias.name)
        return None

    def _class(self, module: str, node: ast.ClassDef) -> Thing:
        """Return the class with what it has of bases in the same tree."""
        names = tuple(ast.unparse(base) for base in node.bases)
        fields: dict[str, Parameter] = {}
        members: dict[str, Thing] = {}
        must_have = next(("all" if base == "Protocol" else "abstract" for base in names
                          if base in ("ABC", "Protocol")), "")
        for base in reversed(names):
            found = self._definition(module, base.partition("[")[0])
            if found is not None and isinstance(found[1], ast.ClassDef):
                inherited = self._class(found[0], found[1])
                fields |= {each.name: each for each in inherited.parameters}
                members |= inherited.members
                must_have = must_have or inherited.must_have
        is_enum = any("Enum" in base or "Flag" in base for base in names)
        for each in node.body:
            match each:
                case ast.FunctionDef(name=name) if name in _CALLED or not name.startswith("_"):
                    members[name] = _method(each)
                case ast.AnnAssign(target=ast.Name(id=name), annotation=of, value=value) if name[0] != "_":
                    default = None if value is None else ast.unparse(value)
                    fields[name] = Parameter(name, "either", ast.unparse(of), default)
                case ast.Assign(targets=targets, value=assigned):
                    text = ast.unparse(assigned) if is_enum else _shown(assigned)
                    for name in filter(lambda name: name[0] != "_", _bound(targets)):
                        made = name in members and text == _COMPUTED  # of the method that it overrides
                        members[name] = replace(members[name], must_have="") if made else Thing("value", text)
        kind = "enum" if is_enum else "class"
        return Thing(kind, "", tuple(fields.values()), names, members, must_have)

    def _literal(self, module: str, name: str, otherwise: Any) -> Any:
        found = self._definition(module, name) if self.module(module) is not None else None
        value = getattr(found[1], "value", None) if found is not None else None
        return otherwise if value is None else ast.literal_eval(value)


_CALLED = frozenset({"__init__", "__call__", "__enter__", "__exit__", "__iter__", "__bool__", "__str__"})
"""Methods that the language calls for a plugin."""


_COMPUTED = "..."


def _function(node: ast.FunctionDef, kind: str, *, of_class: bool = False) -> Thing:
    given = node.args
    plain = [("positional", each) for each in given.posonlyargs] + [("either", each) for each in given.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults))
    defaults += given.defaults
    found = [_parameter(each, how, default) for (how, each), default in zip(plain, defaults, strict=True)]
    found += [_parameter(given.vararg, "*", None)] if given.vararg else []
    found += [_parameter(each, "keyword", default)
              for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    found += [_parameter(given.kwarg, "**", None)] if given.kwarg else []
    return Thing(kind, _unparsed(node.returns), tuple(found[1:] if of_class else found))


def _method(node: ast.FunctionDef) -> Thing:
    marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
    if marks & {"property", "cached_property"}:
        return Thing("property", _unparsed(node.returns))
    found = _function(node, "function", of_class="staticmethod" not in marks)
    kind = next(iter(marks & {"classmethod", "staticmethod"}), "function")
    is_abstract = "abstractmethod" in marks
    return Thing(kind, found.type, found.parameters, must_have="abstract" if is_abstract else "")


def _parameter(given: ast.arg, kind: str, default: ast.expr | None) -> Parameter:
    shown = None if default is None else ast.unparse(default)
    return Parameter(given.arg, kind, _unparsed(given.annotation), shown)


def _unparsed(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node).strip("'\"")


def _shown(value: ast.expr | None) -> str:
    """Return a literal or a type; `_COMPUTED` for anything else."""
    if value is None or any(isinstance(node, (ast.Call, ast.DictComp)) for node in ast.walk(value)):
        return _COMPUTED
    return ast.unparse(value)


def _bound(targets: Sequence[ast.expr]) -> list[str]:
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


# This checkout: what is public, and what a module uses.

PUBLIC_NAMES = frozenset(
    f"{module}.{name}" for module, names in {CONTRACT: __all__, **PUBLIC}.items() for name in names)
"""What a plugin may import of the core."""


def names_of_the_core(module: Module) -> Iterator[tuple[str, int]]:
    """Yield the names of the core that *module* imports, or uses of a module that it imports; with lines."""
    modules: dict[str, str] = {}
    for imported in module.imports():
        if imported.top == "kproxy_core":
            if imported.bound and imported.module in PUBLIC:
                modules[imported.bound] = imported.module
            else:
                yield imported.module, imported.line
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=bound), attr=name) if bound in modules:
                yield f"{modules[bound]}.{name}", node.lineno


# Two trees.

@dataclass(frozen=True)
class Change:
    name: str
    what: str
    is_compatible: bool = False

    def __str__(self) -> str:
        return f"{'compatible' if self.is_compatible else 'INCOMPATIBLE'}: {self.name}: {self.what}"


def changes(old: Tree, new: Tree) -> list[Change]:
    """Return what changed between two trees, by name."""
    return list(_named(old.things(), new.things(), "", ""))


def _named(
    before: Mapping[str, Thing], after: Mapping[str, Thing], where: str, must_have: str
) -> Iterator[Change]:
    """Yield the changes of names, or of the members of a class, of which implementations *must_have* some."""
    for name in sorted({*before, *after}):
        if name not in after:
            yield Change(f"{where}{name}", "removed")
        elif name not in before:
            is_optional = not must_have or (must_have == "abstract" and not after[name].must_have)
            yield Change(f"{where}{name}", "added", is_optional)
        else:
            yield from _thing(f"{where}{name}", before[name], after[name], is_implemented=bool(must_have))


def _thing(name: str, old: Thing, new: Thing, *, is_implemented: bool) -> Iterator[Change]:
    if old.kind != new.kind:
        yield Change(name, f"was {_a(old.kind)}, is {_a(new.kind)}")
        return
    if old.type != new.type:
        verb = "was" if old.kind in ("value", "property") else "returned"
        yield Change(name, f"{verb} {old.type or 'unknown'}, now {new.type or 'unknown'}")
    for base in sorted(set(old.bases) - set(new.bases)):
        yield Change(name, f"no longer {_a(base)}")
    if new.must_have and not old.must_have:
        yield Change(name, "must be implemented now")
    # Implementations of hooks leave out what they do not use; those of methods are given every argument.
    yield from _parameters(name, old, new, may_add=not is_implemented)
    yield from _named(old.members, new.members, f"{name}.", new.must_have)


def _a(noun: str) -> str:
    return f"{'an' if noun[:1] in 'aeioAEIO' else 'a'} {noun}"


def _parameters(name: str, old: Thing, new: Thing, *, may_add: bool) -> Iterator[Change]:
    before, after = ({each.name: each for each in thing.parameters} for thing in (old, new))
    for each in old.parameters:
        found = after.get(each.name)
        if found is None:
            yield Change(f"{name}({each.name})", "removed")
        elif found != each:
            is_eased = may_add and each.default is None and replace(found, default=None) == each
            yield Change(f"{name}({each.name})", f"was {each}, is {found}", is_eased)
    for each in new.parameters:
        if each.name not in before:
            needed = each.default is None and "*" not in each.kind and old.kind != "hook"
            yield Change(f"{name}({each.name})", f"added, {each}", may_add and not needed)
    kept = [each.name for each in old.parameters if each.name in after and each.kind != "keyword"]
    now = [each.name for each in new.parameters if each.kind != "keyword"]
    if old.kind != "hook" and kept != now[:len(kept)]:
        yield Change(name, "takes its arguments in another order")


def verdict(old: Tree, new: Tree, found: Sequence[Change]) -> tuple[int, str]:
    """Return the exit status, and a sentence on the version that *found* asks for."""
    (major, minor), (now_major, now_minor) = old.version, new.version
    broken = sum(not change.is_compatible for change in found)
    if not found:
        return 0, f"no change, contract {now_major}.{now_minor}"
    if broken and now_major <= major:
        return 1, f"{broken} incompatible changes need contract {major + 1}.0; it is {now_major}.{now_minor}"
    is_raised = (now_major, now_minor) > (major, minor)
    advice = "" if is_raised else f"; a release with them needs contract {major}.{minor + 1}"
    return 0, f"{len(found)} changes, {broken} incompatible, contract {now_major}.{now_minor}{advice}"


# The page.

def listing(tree: Tree) -> list[str]:
    """Return the lines of the page that list what a plugin may import."""
    lines = []
    for module, names in tree.public.items():
        text = f"- `{module}`: {tree.purpose(module)}. {', '.join(f'`{name}`' for name in names)}"
        lines += wrap(text, 120, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def main(words: Sequence[str], root: Path = CHECKOUT) -> int:
    if not words:
        print(*listing(Tree(directory(root))), sep="\n")
        return 0
    try:
        old = Tree(commit(words[0], root))
        new = Tree(commit(words[1], root) if words[1:] else directory(root))
        found = changes(old, new)
    except (ValueError, LookupError) as error:
        print(error, file=sys.stderr)
        return 2
    status, sentence = verdict(old, new, found)
    print(*found, sentence, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

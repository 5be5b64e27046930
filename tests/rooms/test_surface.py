"""The names that plugins may import: the list, the page, the plugins, and the comparison of two commits."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.rooms import surface
from tests.rooms.modules import CHECKOUT, Module, load, modules_of_plugins
from tests.rooms.surface import Tree, changes, directory, verdict

PAGE = (CHECKOUT / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
LIST = "\n".join(surface.listing(Tree(directory(CHECKOUT))))


def test_the_page_prints_the_list() -> None:
    """If not, put in what ``python -m tests.rooms.surface`` prints."""
    assert LIST in PAGE


def test_every_public_name_is_there_and_used_by_a_plugin_or_explained_on_the_page() -> None:
    """Plugins use no other: `rules.plugins_know_the_contract`."""
    things = Tree(directory(CHECKOUT)).things()
    assert {name for name in things if not name.startswith("hook ")} == surface.PUBLIC_NAMES
    examples = load(CHECKOUT / "examples" / "kproxy-backend-example", "kproxy_plain")
    blocks = [Module("page", block) for block in re.findall(r"^```python\n(\S.*?)```", PAGE, re.M | re.S)]
    used = {name for module in [*modules_of_plugins(), *examples, *blocks]
            for name, _ in surface.names_of_the_core(module)}
    explained = set(re.findall(r"`(?:[\w.]+\.)?(\w+)[`(]", PAGE.replace(LIST, "")))
    left = {name for name in surface.PUBLIC_NAMES - used if name.rpartition(".")[2] not in explained}
    assert left == set()


# Comparison.

FILES = {
    "kproxy_core/contract/__init__.py": """
from kproxy_core.contract.values import CONTRACT, Answer, Backend, Kind, Layered, NUMBER, Told, either
__all__ = ["CONTRACT", "Answer", "Backend", "Kind", "Layered", "NUMBER", "Told", "either"]
""",
    "kproxy_core/contract/public.py": 'PUBLIC: Mapping = {"kproxy_core.linux.run": ("run",)}\n',
    "kproxy_core/contract/hooks.py": """
@hookspec
def kproxy_ask(what: str) -> int:
    '''Ask.'''
""",
    "kproxy_core/contract/values.py": """
from kproxy_core.model.told import Told
CONTRACT = (1, 2)
NUMBER: Final = 3
either = int | str

class Kind(enum.Enum):
    ONE = "one"

class Answer(NamedTuple):
    what: str
    number: int = 0

class Backend(ABC):
    @abstractmethod
    def sync(self, update: str) -> int:
        '''Sync.'''
    def watch(self) -> bool:
        return False

class Layered(Backend):
    sync = _of_base(Backend.sync)
""",
    "kproxy_core/model/told.py": "class Told(Exception):\n    @property\n    def why(self) -> str: ...\n",
    "kproxy_core/linux/run.py": """
def run(program: str, *, stdin: str = '') -> bytes: ...
def _hidden() -> None: ...
""",
}
VALUES, RUN = "kproxy_core/contract/values.py", "kproxy_core/linux/run.py"


def tree(files: Mapping[str, str]) -> Tree:
    return Tree(files.get)


def changed(path: str, old: str, new: str) -> dict[str, str]:
    assert old in FILES[path]
    return {**FILES, path: FILES[path].replace(old, new)}


def test_equal_trees_have_no_changes() -> None:
    moved = {**changed(VALUES, "NUMBER: Final = 3\n", "from kproxy_core.model.number import NUMBER\n"),
             "kproxy_core/model/number.py": "NUMBER: Final = 3\n"}
    hidden = changed(RUN, "_hidden() -> None", "_hidden(now: int) -> int")
    raised = changed(VALUES, "(1, 2)", "(1, 3)")
    for files in (FILES, moved, hidden, raised):
        found = changes(tree(FILES), tree(files))
        assert (found, verdict(tree(FILES), tree(files), found)[0]) == ([], 0)


@pytest.mark.parametrize(("path", "old", "new", "told"), [
    (VALUES, 'ONE = "one"', 'ONE = "one"\n    TWO = "two"', "kproxy_core.contract.Kind.TWO: added"),
    (VALUES, "number: int = 0", "number: int = 0\n    more: str = ''",
     "kproxy_core.contract.Answer(more): added, more: str = ''"),
    (VALUES, "    def watch", "    def close(self) -> None: ...\n    def watch",
     "kproxy_core.contract.Backend.close: added"),
    (RUN, "stdin: str = ''", "stdin: str = '', seconds: float = 1",
     "kproxy_core.linux.run.run(seconds): added, seconds: float = 1"),
    (RUN, "program: str", "program: str = 'true'",
     "kproxy_core.linux.run.run(program): was program: str, is program: str = 'true'"),
    ("kproxy_core/contract/hooks.py", "what: str", "what: str, whom: str",
     "hook kproxy_ask(whom): added, whom: str"),
    ("kproxy_core/contract/public.py", '"run",', '"run", "_hidden"', "kproxy_core.linux.run._hidden: added"),
])  # fmt: skip
def test_an_addition_is_compatible(path: str, old: str, new: str, told: str) -> None:
    files = changed(path, old, new)
    found = changes(tree(FILES), tree(files))
    assert f"compatible: {told}" in map(str, found)
    assert all(change.is_compatible for change in found)
    status, sentence = verdict(tree(FILES), tree(files), found)
    assert status == 0
    assert sentence.endswith("needs contract 1.3")


@pytest.mark.parametrize(("path", "old", "new", "told"), [
    (VALUES, 'ONE = "one"', 'ONE = "1"', "kproxy_core.contract.Kind.ONE: was 'one', now '1'"),
    (VALUES, 'ONE = "one"', 'TWO = "two"', "kproxy_core.contract.Kind.ONE: removed"),
    (VALUES, "number: int = 0", "number: int = 1",
     "kproxy_core.contract.Answer(number): was number: int = 0, is number: int = 1"),
    (VALUES, "number: int = 0", "number: float = 0",
     "kproxy_core.contract.Answer(number): was number: int = 0, is number: float = 0"),
    (VALUES, "    number: int = 0", "", "kproxy_core.contract.Answer(number): removed"),
    (VALUES, "what: str", "first: str\n    what: str",
     "kproxy_core.contract.Answer: takes its arguments in another order"),
    (VALUES, "what: str", "what: str\n    first: str",
     "kproxy_core.contract.Answer(first): added, first: str"),
    (VALUES, "NUMBER: Final = 3", "NUMBER: Final = 4",
     "kproxy_core.contract.NUMBER: was Final = 3, now Final = 4"),
    (VALUES, "either = int | str", "either = int", "kproxy_core.contract.either: was int | str, now int"),
    (VALUES, "class Kind(enum.Enum):\n    ONE", "class Kind:\n    ONE",
     "kproxy_core.contract.Kind: was an enum, is a class"),
    (VALUES, "watch(self) -> bool", "watch(self, now: bool = True) -> bool",
     "kproxy_core.contract.Backend.watch(now): added, now: bool = True"),
    (VALUES, "watch(self) -> bool", "watch(self) -> int",
     "kproxy_core.contract.Layered.watch: returned bool, now int"),
    (VALUES, "    def watch", "    @abstractmethod\n    def stop(self) -> None: ...\n    def watch",
     "kproxy_core.contract.Backend.stop: added"),
    (VALUES, "    def watch", "    @abstractmethod\n    def watch",
     "kproxy_core.contract.Backend.watch: must be implemented now"),
    ("kproxy_core/model/told.py", "(Exception)", "", "kproxy_core.contract.Told: no longer an Exception"),
    ("kproxy_core/model/told.py", "    @property\n", "",
     "kproxy_core.contract.Told.why: was a property, is a function"),
    (RUN, "program: str, *, stdin", "program: str, stdin",
     "kproxy_core.linux.run.run(stdin): was stdin: str = '', is stdin: str = ''"),
    (RUN, "stdin: str = ''", "stdin: str",
     "kproxy_core.linux.run.run(stdin): was stdin: str = '', is stdin: str"),
    ("kproxy_core/contract/hooks.py", "what: str", "", "hook kproxy_ask(what): removed"),
    ("kproxy_core/contract/public.py", '("run",)', "()", "kproxy_core.linux.run.run: removed"),
])  # fmt: skip
def test_what_breaks_a_plugin_is_incompatible(path: str, old: str, new: str, told: str) -> None:
    files = changed(path, old, new)
    found = changes(tree(FILES), tree(files))
    assert f"INCOMPATIBLE: {told}" in map(str, found)
    status, sentence = verdict(tree(FILES), tree(files), found)
    assert (status, "need contract 2.0; it is 1.2" in sentence) == (1, True)
    raised = {**files, VALUES: files[VALUES].replace("(1, 2)", "(2, 0)")}
    assert verdict(tree(FILES), tree(raised), changes(tree(FILES), tree(raised)))[0] == 0


def test_two_commits_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True)

    git("init", "--initial-branch", "main")
    for files in (FILES, changed(RUN, "program: str", "command: str")):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        git("add", ".")
        git("commit", "--message", "A commit")
    assert surface.main(["HEAD~1", "HEAD"], tmp_path) == 1
    assert "INCOMPATIBLE: kproxy_core.linux.run.run(program): removed" in capsys.readouterr().out
    assert surface.main(["HEAD~1"], tmp_path) == 1
    assert surface.main(["HEAD"], tmp_path) == 0
    assert surface.main(["no-such-branch"], tmp_path) == 2
    assert "'no-such-branch' is no commit" in capsys.readouterr().err

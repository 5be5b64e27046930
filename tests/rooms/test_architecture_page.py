"""ARCHITECTURE.md draws the rooms, the imports and the modules of plugins as they are."""

import re

from tests.rooms import roles, rules
from tests.rooms.modules import CHECKOUT, modules_of_core, modules_of_plugins
from tests.rooms.surface import Tree, directory

PAGE = (CHECKOUT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_the_page_says_who_may_import_whom() -> None:
    said = {
        found[1]: frozenset(re.findall(r"\w+", found[2]))
        for found in re.finditer(r"^(\w+) +->([\w ,]*)$", PAGE, re.MULTILINE)
    }
    assert said == {
        **rules.ROOMS, "cli": frozenset(rules.ROOMS) - {"kit"}, "plugin": rules.PLUGINS_MAY_IMPORT}


def test_the_page_names_every_room_and_plugin() -> None:
    drawn = set(re.findall(r"^[├└]── (\w+) ", PAGE, re.MULTILINE))
    assert drawn == {module.room for module in modules_of_core()} - {""}
    assert {module.top for module in modules_of_plugins()} <= set(re.findall(r"kproxy_\w+", PAGE))


def test_the_page_has_the_table_of_roles() -> None:
    """If not, put in what ``python -m tests.rooms.roles`` prints."""
    assert "\n".join(roles.table()) in PAGE
    assert roles.without_a_meaning() == set()


def test_the_page_names_every_hook() -> None:
    hooks = {name for name in Tree(directory(CHECKOUT)).things() if name.startswith("hook ")}
    assert {f"hook {name}" for name in re.findall(r"`(kproxy_\w+)[`(]", PAGE)} == hooks


def test_the_flow_names_modules_that_exist() -> None:
    named = {f"kproxy_core.{name}" for name in re.findall(r"\b(?:kube|sync)\.\w+", PAGE)}
    assert len(named) > 4
    assert named <= {module.name for module in modules_of_core()}

"""The architecture as a test: who may import whom, and what each module may know."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distribution, entry_points, requires

import pytest

from kproxy_core.contract.hooks import ENTRY_POINTS
from tests.rooms import rules
from tests.rooms.modules import (
    CHECKOUT,
    Module,
    circles,
    modules_of_core,
    modules_of_kit,
    modules_of_plugins,
    modules_of_tests,
)

KPROXY = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
EXTRAS = KPROXY["optional-dependencies"]

Rule = Callable[[Module], Iterator[str]]


def offences(rule: Rule, modules: Iterable[Module]) -> list[str]:
    return [offence for module in modules for offence in rule(module)]


@pytest.mark.parametrize(
    "rule",
    [
        rules.rooms_of_the_core,
        rules.core_names_no_backend,
        rules.nft_knows_no_service,
        rules.pure_modules_do_no_io,
        rules.has_one_purpose,
    ],
)
def test_core(rule: Rule) -> None:
    assert offences(rule, [*modules_of_core(), *modules_of_kit()]) == []


@pytest.mark.parametrize(
    "rule",
    [
        rules.plugins_know_the_contract,
        rules.plugins_speak_one_grammar,
        rules.pure_modules_do_no_io,
        rules.has_one_purpose,
    ],
)
def test_plugins(rule: Rule) -> None:
    assert offences(rule, modules_of_plugins()) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles([*modules_of_core(), *modules_of_kit(), *modules_of_plugins()]) == []


def test_every_package_holds_modules() -> None:
    modules = [*modules_of_core(), *modules_of_kit(), *modules_of_plugins()]
    packages = {module.name for module in modules if module.is_package} - {"kproxy_conformance.scenarios"}
    assert packages <= {module.name.rpartition(".")[0] for module in modules}


def test_every_test_can_fail() -> None:
    assert offences(rules.tests_can_fail, modules_of_tests()) == []


def test_every_room_has_a_rule() -> None:
    rooms = {module.room for module in [*modules_of_core(), *modules_of_kit()]} - {""}
    assert rooms <= {*rules.ROOMS, "cli"}
    assert rooms <= set(rules.THIRD_PARTY)


def test_rooms_may_import_only_packages_that_they_use() -> None:
    used: dict[str, set[str]] = {}
    for module in [*modules_of_core(), *modules_of_kit(), *modules_of_plugins()]:
        room = module.top if module.top in rules.THIRD_PARTY_OF_PLUGINS else module.room
        used.setdefault(room, set()).update(
            imported.top for imported in module.imports()
            if not imported.from_standard_library and not imported.top.startswith("kproxy_"))
    allowed = {**rules.THIRD_PARTY, **rules.THIRD_PARTY_OF_PLUGINS}
    assert {room: packages for room, packages in used.items() if packages} == {
        room: packages for room, packages in allowed.items() if packages}


def test_every_declared_dependency_is_imported_and_every_import_declared() -> None:
    used = set().union(
        *(packages for room, packages in rules.THIRD_PARTY.items() if room != "kit"),
        *rules.THIRD_PARTY_OF_PLUGINS.values())
    declared = KPROXY["dependencies"] + EXTRAS["api"] + EXTRAS["ipvs"] + EXTRAS["top"]
    assert _modules(declared) == used - rules.FROM_THE_DISTRIBUTION
    assert EXTRAS["all"] == ["kproxy[api,ipvs,top]"]
    assert _modules(requires("kproxy-conformance") or []) == {"kproxy", *rules.THIRD_PARTY["kit"]}


def _modules(requirements: Iterable[str]) -> set[str]:
    """Return the modules that *requirements* install."""
    names = [re.split(r"[^\w-]", requirement)[0] for requirement in requirements]
    return {rules.IMPORTED_AS.get(name, name) for name in names}


def test_modules_that_need_an_extra_are_few() -> None:
    """The rest of the program works without, so that a missing one is named and ends nothing else."""
    modules = [
        module.name for module in [*modules_of_core(), *modules_of_plugins()] if module.room != "fleet"]
    program = f"""
import importlib, sys
sys.modules |= dict.fromkeys({sorted(_modules(EXTRAS["api"] + EXTRAS["ipvs"] + EXTRAS["top"]))!r})
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        print(name)
"""
    needing = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(needing.stdout.split()) == {
        "kproxy_core.kube.protobuf", "kproxy_core.kube.reflector", "kproxy_core.kube.requests",
        "kproxy_core.kube.transport", "kproxy_core.observe.event_writer",
    }  # fmt: skip


def test_the_kit_is_of_the_same_version() -> None:
    kit = distribution("kproxy-conformance")
    assert kit.version == distribution("kproxy").version
    assert f"kproxy=={kit.version}" in (kit.requires or [])


def test_the_page_of_dependencies_names_each() -> None:
    page = (CHECKOUT / "docs" / "design" / "dependencies.md").read_text(encoding="utf-8")
    names = {module: name for name, module in rules.IMPORTED_AS.items()}
    for package in set().union(*rules.THIRD_PARTY.values()) | {"pyroute2"}:
        assert f"| {names.get(package, package)}" in page
    for path in re.findall(r"`((?:tests|kproxy_\w+)/[\w/.]+)`", page):
        assert (CHECKOUT / path).exists() or (CHECKOUT / "plugins" / path).exists(), path


def test_every_module_is_shipped() -> None:
    """setup.cfg names each package, so that an installed kproxy is complete."""
    text = (CHECKOUT / "setup.cfg").read_text(encoding="utf-8")
    shipped = {line.strip() for line in text.splitlines()}
    packages = {module.name for module in [*modules_of_core(), *modules_of_plugins()] if module.is_package}
    assert packages <= shipped


def test_every_backend_is_announced() -> None:
    """Ours come through the same door as everybody's: the entry points of the installed distribution."""
    announced = {entry.module for entry in entry_points(group=ENTRY_POINTS)}
    assert {module.name for module in modules_of_plugins() if module.last == "hooks"} <= announced


@pytest.mark.parametrize(
    "module",
    ["kproxy_core.cli", *sorted(module.name for module in modules_of_plugins() if module.last == "hooks")],
)
def test_start_up_imports_nothing_heavy(module: str) -> None:
    """Every start pays for these imports, `kproxy --help` included. Heavy modules are imported on use."""
    heavy = {
        "asyncio",
        "bcc",
        "hypothesis",
        "kubernetes",
        "nftables",
        "pkg_resources",
        "prometheus_client",
        "pyroute2",
        "pytest",
        "rich",
        "yaml",
    }
    program = f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))"
    imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert imported.stdout.split() == []


OFFENCES: list[tuple[Rule, str, str]] = [
    (rules.rooms_of_the_core, "kproxy_core.model.service", "import yaml"),
    (rules.rooms_of_the_core, "kproxy_core.model.service", "from kproxy_core.plan import fate"),
    (rules.rooms_of_the_core, "kproxy_core.model.service", "from ..plan.usable import Usable"),
    (rules.rooms_of_the_core, "kproxy_core.plan.endpoints", "def f():\n    import kproxy_core.sync"),
    (rules.rooms_of_the_core, "kproxy_core.linux.sysctl", "import kproxy_core.kube.store"),
    (rules.rooms_of_the_core, "kproxy_core.linux.sysctl", "from kproxy_core import contract"),
    (rules.rooms_of_the_core, "kproxy_core.sync.loop", "import kproxy_core.cli"),
    (rules.rooms_of_the_core, "kproxy_core.sync.loop", "from kproxy_core.observe.health import ProxyHealth"),
    (rules.rooms_of_the_core, "kproxy_core.sync.loop", "import kproxy_core.config.settings"),
    (rules.rooms_of_the_core, "kproxy_core.sync.loop", "from kproxy_nftables import backend"),
    (rules.rooms_of_the_core, "kproxy_core.cli", "import importlib\nimportlib.import_module('kproxy_ipvs')"),
    (rules.rooms_of_the_core, "kproxy_core.cli", "import requests"),
    (rules.plugins_know_the_contract, "kproxy_nftables.backend", "from kproxy_core.sync.loop import Loop"),
    (rules.plugins_know_the_contract, "kproxy_nftables.backend", "import kproxy_core.kube"),
    (rules.plugins_know_the_contract, "kproxy_nftables.backend", "import pyroute2"),
    (rules.plugins_know_the_contract, "kproxy_nft.table", "from kproxy_core.model.node import NodeView"),
    (rules.plugins_know_the_contract, "kproxy_nftables.backend", "from kproxy_core.contract import calls"),
    (rules.plugins_know_the_contract, "kproxy_nftables.backend", "from kproxy_core.contract import *"),
    (rules.plugins_know_the_contract, "kproxy_nftables.kernel", "from kproxy_core.linux import files"),
    (rules.plugins_know_the_contract, "kproxy_nftables.kernel", "import kproxy_core.linux.sysctl"),
    (rules.plugins_know_the_contract, "kproxy_nftables.kernel",
     "from kproxy_core.linux import sysctl as settings\nsettings.missing()"),
    (rules.plugins_know_the_contract, "kproxy_nftables.backend", "from kproxy_core import config"),
    (rules.plugins_know_the_contract, "kproxy_ebpf.backend", "from kproxy_nftables.kernel import Kernel"),
    (rules.plugins_know_the_contract, "kproxy_ipvs.kernel.requirements", "import kproxy_iptables.kernel"),
    (rules.plugins_speak_one_grammar, "kproxy_nftables.tables", "'A role of its own.'"),
    (rules.plugins_speak_one_grammar, "kproxy_nftables.family", "import subprocess"),
    (rules.plugins_speak_one_grammar, "kproxy_ipvs.family", "from kproxy_core.linux import sysctl"),
    (rules.pure_modules_do_no_io, "kproxy_core.plan.endpoints", "import logging"),
    (rules.pure_modules_do_no_io, "kproxy_core.model.node", "from os import environ"),
    (rules.pure_modules_do_no_io, "kproxy_nftables.wanted", "import time"),
    (rules.pure_modules_do_no_io, "kproxy_ipvs.batch", "from socket import AF_INET"),
    (rules.pure_modules_do_no_io, "kproxy_ipvs.batch", "import os"),
    (rules.pure_modules_do_no_io, "kproxy_nftables.applied", "from kproxy_nftables import kernel"),
    (rules.pure_modules_do_no_io, "kproxy_nftables.applied", "from .kernel import send"),
    (rules.pure_modules_do_no_io, "kproxy_ipvs.names", "from kproxy_core.linux import sysctl"),
    (rules.pure_modules_do_no_io, "kproxy_xtables.removal", "from kproxy_xtables.tables import Tables"),
    (rules.pure_modules_do_no_io, "kproxy_ipvs.skeleton", "from kproxy_xtables import tables"),
    (rules.pure_modules_do_no_io, "kproxy_core.netlink.messages", "import socket"),
    (rules.core_names_no_backend, "kproxy_core.sync.loop", "if mode == 'nftables': pass"),
    (rules.core_names_no_backend, "kproxy_core.cli", "def start_ipvs(): pass"),
    (rules.core_names_no_backend, "kproxy_core.cli", "start(IPTables=1)"),
    (rules.nft_knows_no_service, "kproxy_core.nft.listing", "KUBE_CHAIN = 1"),
    (rules.nft_knows_no_service, "kproxy_core.nft.listing", "table == 'kproxy'"),
    (rules.has_one_purpose, "kproxy_core.sync.utils", "'''Doc.'''"),
    (rules.has_one_purpose, "kproxy_core.sync.loop", "pass"),
    (rules.tests_can_fail, "tests.core.test_x", "def test_nothing():\n    print(1)"),
    (rules.tests_can_fail, "tests.core.test_x", "@pytest.mark.skip\ndef test_it():\n    assert True"),
]


@pytest.mark.parametrize(("rule", "name", "source"), OFFENCES)
def test_offence_is_noticed(rule: Rule, name: str, source: str) -> None:
    assert offences(rule, [Module(name, source)])


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (rules.rooms_of_the_core, "kproxy_core.sync.loop", "import queue, kproxy_core.linux.conntrack"),
        (rules.rooms_of_the_core, "kproxy_core.cli", "import click, kproxy_core.sync.loop"),
        (rules.rooms_of_the_core, "kproxy_core.plan.claims", "from .fate import x; from ..model import y"),
        (rules.plugins_know_the_contract, "kproxy_ipvs.hooks", "import kproxy_xtables.tables, pyroute2"),
        (rules.plugins_know_the_contract, "kproxy_ipvs.hooks",
         "from kproxy_core.contract import Family as IPFamily\nfrom kproxy_core.linux import sysctl\n"
         "sysctl.read('net.ipv4.ip_forward')"),
        (rules.pure_modules_do_no_io, "kproxy_nftables.kernel", "import os, socket"),
        (rules.pure_modules_do_no_io, "kproxy_nftables.applied", "from kproxy_nftables.names import NAME"),
        (rules.pure_modules_do_no_io, "kproxy_ipvs.batch", "from kproxy_core.netlink import messages"),
        (rules.core_names_no_backend, "kproxy_core.sync.loop", "'''As kube-proxy's ipvs mode does.'''"),
        (rules.nft_knows_no_service, "kproxy_core.nft.rules", "from kproxy_core.model import address"),
        (rules.tests_can_fail, "tests.core.test_x", "def test_it():\n    with pytest.raises(OSError): f()"),
    ],
)
def test_allowed_imports_are_accepted(rule: Rule, name: str, source: str) -> None:
    assert offences(rule, [Module(name, source)]) == []


def test_every_rule_has_an_offence() -> None:
    every = {
        rule
        for name, rule in vars(rules).items()
        if callable(rule) and not name.startswith("_") and getattr(rule, "__module__", "") == rules.__name__
    }
    assert every == {rule for rule, _, _ in OFFENCES}

"""Plugins are found, checked and kept out one by one."""

import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

import pluggy
import pytest

from kproxy_conformance.builders import full_update, node_view, plans, service
from kproxy_core.config.flags import Flags
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import PluginFailed, SyncFailed, Unsupported
from kproxy_core.contract.hooks import ENTRY_POINTS
from kproxy_core.contract.registry import PluginRefused, Registry, UnknownMode
from kproxy_core.contract.values import BackendSettings, Fallback, SyncReport
from kproxy_core.linux import process
from kproxy_core.model.address import Family
from kproxy_core.modes.choice import Conclusion, conclude
from kproxy_core.modes.settings import Configuration
from tests.core.installed_plugins import install, on_path

SETTINGS = BackendSettings((Family.IPV4,))

PLUGIN = '''
from kproxy_core.contract import *

@hookimpl
def kproxy_describe():
    return Description(mode="{mode}", summary="a test", contract={contract}, preference={preference})

@hookimpl
def kproxy_detect(settings):
    return Detection((Requirement("a kernel", {usable}, "one", "get one"),))

@hookimpl
def kproxy_cleanup(dry_run):
    return Leftovers(("what was left",))

@hookimpl
def kproxy_make_backend(mode, settings, base):
    return Made()

class Made(Backend):
    def sync(self, update):
        return SyncReport(len(update.plans))
    def render(self, update):
        return "rules"
'''


def plugin(mode: str, *, contract: str = "(1, 0)", preference: int = 0, usable: bool = True) -> str:
    """The source of a plugin that keeps the contract, unless told otherwise."""
    return PLUGIN.format(mode=mode, contract=contract, preference=preference, usable=usable)


Install = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path) -> Iterator[Install]:
    """Installs ``put(distribution, mode=source, ...)``: a module for each mode."""

    def put(distribution: str, **sources: str) -> None:
        modules = {f"{distribution}_{mode}": source for mode, source in sources.items()}
        install(tmp_path, distribution, {m: f"{distribution}_{m}" for m in sources}, **modules)

    with on_path(tmp_path):
        yield put


def refused(registry: Registry) -> Mapping[str, str]:
    registry.load_all()
    return {broken.name: str(broken) for broken in registry.broken}


def test_the_mode_selected_makes_the_backend_that_gets_the_work(put: Install) -> None:
    put("good", good=plugin("good"), other=plugin("other"))
    registry = Registry()
    instance = registry.make_backend("good", SETTINGS)
    node = node_view()
    update = full_update(node, plans(node, service("web")))
    assert instance.sync(update) == SyncReport(1)
    assert instance.render(update) == "rules"


def test_no_backend_gets_the_work_of_another_that_is_made_meanwhile(
    put: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread makes and closes backends at any moment of a call."""
    put("good", good=plugin("good"), other=plugin("other").replace("len(update.plans)", "99"))
    registry = Registry()
    serving = registry.make_backend("good", SETTINGS)
    update = full_update(node_view(), plans(node_view(), service("web")))

    def make_another(*_: object) -> None:
        monkeypatch.undo()
        made.append(registry.make_backend("other", SETTINGS))

    made: list[BackendInstance] = []
    # pluggy calls this after it has chosen the hook, and before it reads the implementations.
    monkeypatch.setattr(pluggy.HookCaller, "_verify_all_args_are_provided", make_another)
    assert serving.sync(update) == SyncReport(1)
    assert made[0].sync(update) == SyncReport(99)
    made[0].close()
    assert serving.sync(update) == SyncReport(1)


def test_our_own_backends_are_entry_points_too(put: Install) -> None:
    put("good", good=plugin("good"))
    assert set(Registry().modes) > {"good"}


def test_only_the_plugin_for_the_mode_is_imported(put: Install) -> None:
    put("good", good=plugin("good"), bad="raise SystemExit('never import this')")
    registry = Registry()
    registry.make_backend("good", SETTINGS)
    assert registry.broken == []
    assert list(registry.descriptions) == ["good"]


def test_an_unknown_mode_is_answered_with_those_that_there_are(put: Install) -> None:
    put("good", good=plugin("good"))
    with pytest.raises(UnknownMode, match=(
        r"no backend provides mode 'goood'; did you mean 'good'\?; installed: .*\bgood\b")):
        Registry().load("goood")


def test_a_group_that_is_nearly_that_of_backends_is_named_with_its_distribution(tmp_path: Path) -> None:
    install(tmp_path, "wrong", {"mine": "wrong_mine"}, group="kproxy.backend", wrong_mine=plugin("mine"))
    install(tmp_path, "other", {"x": "y"}, group="somebody.backends")
    with on_path(tmp_path), pytest.raises(UnknownMode) as raised:
        Registry().load("mine")
    assert re.fullmatch(
        r"no backend provides mode 'mine'; installed: .*, by entry points of the group 'kproxy\.backends'; "
        r"the group 'kproxy\.backend' of wrong 1\.0 is not read", str(raised.value))


MISFITS = {
    "missing import": ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    "error": ("raise RuntimeError('line one\\nline two')", "RuntimeError: line one; line two"),
    "exit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "syntax": ("def broken(:", "SyntaxError"),
    "no plugin": ("", "it lacks the hook kproxy_describe"),
    "too new": (plugin("bad", contract="(2, 0)"), "written for contract 2.0, this kproxy offers 1.1"),
    "too old": (plugin("bad", contract="(0, 9)"), "written for contract 0.9, this kproxy offers 1.1"),
    "newer": (plugin("bad", contract="(1, 99)"), "written for contract 1.99, this kproxy offers 1.1"),
    "no version": (plugin("bad", contract="'1.0'"), "Description.contract: str, not tuple[int, int]"),
    "no description": (plugin("bad").replace("return Description", "return dict"), "dict, not Description"),
    "other name": (plugin("other"), "its entry point is named 'bad', it calls itself 'other'"),
    "missing hook": (plugin("bad").replace("@hookimpl\ndef kproxy_cleanup", "def x"), "lacks the hook"),
    "unknown hook": (plugin("bad").replace("def kproxy_detect", "def detect"), "a hook detect, unknown"),
    "unknown argument": (plugin("bad").replace("(dry_run)", "(wet_run)"), "wet_run"),
}


@pytest.mark.parametrize(("source", "problem"), MISFITS.values(), ids=MISFITS)
def test_a_plugin_that_does_not_fit_is_one_line_and_harms_no_other(
    put: Install, source: str, problem: str
) -> None:
    put("culprit", bad=source)
    put("innocent", good=plugin("good"))
    registry = Registry()
    line = refused(registry)["bad"]
    assert problem in line
    assert line.startswith("plugin 'bad' of culprit 1.0 is not used: ")
    assert "\n" not in line
    assert "bad" not in registry.descriptions
    assert registry.make_backend("good", SETTINGS) is not None
    with pytest.raises(PluginRefused, match=r"culprit 1\.0"):
        registry.load("bad")
    assert [b.name for b in registry.broken].count("bad") == 1


def test_the_second_distribution_that_offers_a_mode_is_kept_out_and_named(put: Install) -> None:
    put("one", same=plugin("same"))
    put("two", same=plugin("same"))
    registry = Registry()
    (broken,) = [broken for broken in registry.broken if broken.name == "same"]
    others = {"one 1.0", "two 1.0"} - {broken.distribution}
    assert broken.problem == f"mode 'same' is already provided by {others.pop()}"
    assert registry.load("same").mode == "same"


@pytest.mark.parametrize(("source", "problem"), [
    (plugin("half").replace("def sync", "def other"), "raised TypeError: .* abstract .*sync"),
    (plugin("half").replace("Made(Backend)", "Made"), "returned Made, not Backend"),
])
def test_a_backend_that_does_not_fit_is_refused(put: Install, source: str, problem: str) -> None:
    put("half", half=source)
    with pytest.raises(PluginFailed, match=f"plugin 'half': kproxy_make_backend {problem}"):
        Registry().make_backend("half", SETTINGS)


def test_a_backend_reports_itself_that_it_can_not_work_here(put: Install) -> None:
    put("no", no=plugin("no").replace("return Made()", "raise Unsupported('no such kernel')"))
    with pytest.raises(Unsupported, match="no such kernel"):
        Registry().make_backend("no", SETTINGS)


def test_one_plugin_is_asked_and_its_failure_is_an_answer(put: Install) -> None:
    put("good", good=plugin("good"), bad=plugin("bad").replace('return Leftovers(', "raise OSError(1, "))
    registry = Registry()
    assert registry.cleanup("good", SETTINGS, dry_run=True).removed == ("what was left",)
    problem = "plugin 'bad': kproxy_cleanup raised PermissionError: [Errno 1] ('what was left',)"
    assert registry.cleanup("bad", SETTINGS, dry_run=True).errors == (problem,)
    assert registry.detect("good", SETTINGS).usable
    assert registry.detect("bad", SETTINGS).mode == "bad"


def test_only_the_plugin_chosen_prepares_and_it_may_have_nothing_to_prepare(put: Install) -> None:
    preparing = "\n@hookimpl\ndef kproxy_prepare(settings): raise SyncFailed(settings.options['who'])\n"
    put("some", good=plugin("good"), eager=plugin("eager") + preparing)
    registry = Registry()
    registry.load_all()
    asked = BackendSettings((Family.IPV4,), options={"who": "eager"})
    registry.prepare("good", asked)
    with pytest.raises(SyncFailed, match="eager"):
        registry.prepare("eager", asked)


def concluded(registry: Registry) -> str:
    return conclude(Configuration(Flags({}), None), registry, SETTINGS.families).mode


def test_without_a_mode_the_usable_one_with_the_highest_preference_is_taken(put: Install) -> None:
    put(
        "some",
        low=plugin("low", preference=1000),
        high=plugin("high", preference=2000),
        best=plugin("best", preference=3000, usable=False),
    )
    assert concluded(Registry()) == "high"


def test_if_no_mode_works_every_reason_is_given(put: Install) -> None:
    put("some", low=plugin("low", usable=False), broken="1/0")
    registry = Registry(e for e in entry_points(group=ENTRY_POINTS) if e.name in ("low", "broken"))
    with pytest.raises(Unsupported) as found:
        concluded(registry)
    assert "low: a kernel: one. get one" in str(found.value)
    assert "plugin 'broken' of some 1.0" in str(found.value)


@pytest.mark.parametrize(("privileged", "mode"), [(True, "low"), (False, "high")])
def test_a_wanted_mode_that_does_not_work_is_replaced_by_its_fallback(
    put: Install, monkeypatch: pytest.MonkeyPatch, privileged: bool, mode: str
) -> None:
    high = plugin("high", usable=False).replace('summary="a test"', 'summary="a test", fallback="low"')
    put("some", low=plugin("low"), high=high)
    held = frozenset({"CAP_NET_ADMIN"} if privileged else ())
    monkeypatch.setattr(process, "network_privileges", lambda: held)
    found = conclude(Configuration(Flags({}), None), Registry(), SETTINGS.families, "high")
    fallback = Fallback("high", "low", "a kernel: one. get one") if privileged else None
    assert found == Conclusion(mode, fallback)


def test_an_observer_wraps_the_work_and_a_broken_one_is_left_out(put: Install, tmp_path: Path) -> None:
    put("good", good=plugin("good"))
    install(tmp_path, "watching", {}, watching_module='''
from kproxy_core.contract.hooks import hookimpl
seen = []
@hookimpl(wrapper=True)
def kproxy_sync(update):
    report = yield
    seen.append(report.operations)
    return report
''')
    (tmp_path / "watching-1.0.dist-info" / "entry_points.txt").write_text(
        "[kproxy.observers]\nwatching = watching_module\nbroken = no_such_module_anywhere\n"
    )
    registry = Registry()
    node = node_view()
    registry.make_backend("good", SETTINGS).sync(full_update(node, plans(node, service("web"))))
    import watching_module  # type: ignore[import-not-found]

    assert watching_module.seen == [1]
    assert [broken.name for broken in registry.broken] == ["broken"]

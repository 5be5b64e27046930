"""A plugin that breaks the contract is named and counted, and only its call fails."""

import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kproxy_conformance.builders import full_update, node_view, plans, service
from kproxy_core.contract.backend import Backend, LayeredBackend
from kproxy_core.contract.calls import METHODS, BackendInstance
from kproxy_core.contract.errors import PluginFailed, Unsupported
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import Measurement, Question
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.modes.switch import start_backend
from kproxy_core.plan.fate import Origin, Packet
from tests.core.contract.test_registry import SETTINGS, plugin
from tests.core.installed_plugins import install, on_path
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import Proxy, running
from tests.patience import PATIENCE

NODE = node_view()
UPDATE = full_update(NODE, plans(NODE, service("web")))
WEB = ServicePortKey("default", "web", "", Protocol.TCP)
HERE = Destination(parse_address("10.1.0.1"), 8080)
QUESTION = Question(Packet(Origin.NODE, HERE.address, HERE.address, Protocol.TCP, 80), NODE, None, None)

FAULTY = '''
import os
from pathlib import Path

FAULTS = Path(os.environ["FAULTS"])
watched = []

def fail():
    raise RuntimeError("a bug \\x1b[31mof\\nmany lines")

def leave():
    raise SystemExit(3)

def yielding():
    yield fail()

class Odd(Exception):
    def __str__(self):
        raise self

def odd():
    raise Odd

def answer(hook, right):
    """What the file named like the hook says, or else the right answer."""
    path = FAULTS / hook
    return eval(path.read_text()) if path.exists() else right
'''
"""Hooks that keep the contract until a file tells them to break it."""

SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: dns, namespace: default}
spec: {clusterIP: 10.96.0.10, ports: [{port: 53, protocol: UDP}]}
"""

QUESTIONS = {
    "kproxy_detect": 'Detection((Requirement("luck", True, "some"),))',
    "kproxy_cleanup": 'Leftovers()', "kproxy_retire": 'Leftovers()',
    "kproxy_supersede": 'Leftovers()', "kproxy_caveats": "[]", "kproxy_prepare": "None",
    "kproxy_dialled": "None", "kproxy_make_backend": "Made()",
}
WORK = {
    "begin": "True", "sync": "SyncReport(0)", "relays": "frozenset()",
    "render": "'rules'", "check_text": "''", "preview": "Preview(0, '')",
    "explain": "[]", "frontends": "[]", "traffic": "[]", "watch": "True",
    "measure": "[]", "close": "None", "retire": "Leftovers()", "reset_connections": "0",
    "wants_relays": "False", "serves_on_loopback": "False", "needs_interface_addresses": "False",
}


def faulty() -> str:
    describes = plugin("faulty").partition("@hookimpl\ndef kproxy_detect")[0]
    text = f"{describes}{FAULTY}"
    for hook, right in QUESTIONS.items():
        text += f"@hookimpl\ndef {hook}():\n    return answer('{hook}', {right})\n"
    text += "class Made(Backend):\n"
    for method, right in WORK.items():
        text += f"    def {method}(self, *given, **named):\n        return answer('{method}', {right})\n"
    watching = "watch(self, damaged):\n        watched.append(damaged)"
    return text.replace("watch(self, *given, **named):", watching)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory in which a file for a hook breaks it."""
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv("FAULTS", str(tmp_path / "faults"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    install(tmp_path, "culprit", {"faulty": "faulty_plugin"}, faulty_plugin=faulty())
    install(tmp_path, "innocent", {"good": "good_plugin"}, good_plugin=plugin("good"))
    with on_path(tmp_path):
        yield tmp_path / "faults"


def made() -> tuple[Registry, BackendInstance]:
    registry = Registry()
    registry.load_all()
    return registry, registry.make_backend("faulty", SETTINGS)


WORKING: dict[str, Callable[[BackendInstance], object]] = {
    "begin": lambda instance: instance.begin(),
    "sync": lambda instance: instance.sync(UPDATE),
    "render": lambda instance: instance.render(UPDATE),
    "check_text": lambda instance: instance.check_text(UPDATE),
    "preview": lambda instance: instance.preview(UPDATE),
    "explain": lambda instance: instance.explain([QUESTION], live=True),
    "frontends": lambda instance: instance.frontends(Family.IPV4),
    "traffic": lambda instance: instance.traffic(Family.IPV4),
    "relays": lambda instance: instance.relays(Family.IPV4, WEB),
    "reset_connections": lambda instance: instance.reset_connections(Family.IPV4, lambda *pair: True),
    "wants_relays": lambda instance: instance.wants_relays(Family.IPV4, Protocol.TCP),
    "serves_on_loopback": lambda instance: instance.serves_on_loopback(NODE, HERE.address, Protocol.TCP),
    "needs_interface_addresses": lambda instance: instance.needs_interface_addresses(Family.IPV4),
    "watch": lambda instance: instance.watch(lambda family, what: None),
    "measure": lambda instance: instance.measure(),
    "close": lambda instance: instance.close(),
}
HARMLESS: dict[str, object] = {
    "relays": frozenset(), "watch": False, "measure": [], "close": None, "wants_relays": False,
    "serves_on_loopback": False, "needs_interface_addresses": False}
"""What the core goes on with: nothing depends on these calls."""

RAISED = {
    "fail()": r"raised RuntimeError: a bug \\x1b\[31mof; many lines",
    "leave()": "raised SystemExit: 3",
    "odd()": "raised Odd: an exception without a message",
}
FRONTEND = "Frontend(Address(bytes(4)), Protocol.TCP, 80)"
COUNT = f"Connections({FRONTEND}, None, 1)"
WRONG = [
    ("begin", "'yes'", "returned str, not bool"),
    ("sync", "None", "returned None"),
    ("sync", "{}", "returned dict, not SyncReport"),
    ("sync", "SyncReport('1')", r"SyncReport\.operations: str, not int"),
    ("sync", "SyncReport(1, detail={'a': 'b'})", r"SyncReport\.detail: a value that is str, not int"),
    ("sync", "SyncReport(1, unserved=None)", r"SyncReport\.unserved: NoneType, not .*Mapping"),
    ("sync", "SyncReport(1, unserved={'a': 'b'})", "a key that is str, not ServicePortKey"),
    ("render", "b''", "returned bytes, not str"),
    ("sync", "SyncReport(1, degraded=None)", r"SyncReport\.degraded: NoneType, not str"),
    ("check_text", "[]", "returned list, not str"),
    ("preview", "(0, '')", "returned tuple, not Preview"),
    ("explain", "[None]", "with NoneType, not KernelSide"),
    ("explain", "[]", "returned 0 answers to 1 questions"),
    ("explain", "[KernelSide(((1, 2),))]", "with tuple, not KernelObject"),
    ("explain", "[KernelSide((), fate='lost')]", r"KernelSide\.fate: str, not Fate"),
    ("frontends", "1", "returned int, not a sequence"),
    ("frontends", "'abc'", "with str, not Frontend"),
    ("frontends", "yielding()", "raised RuntimeError"),
    ("frontends", "[Frontend([], Protocol.TCP, 80)]", r"Frontend\.address: list, not bytes"),
    ("traffic", f"[({FRONTEND}, None, 1)]", "with tuple, not Connections"),
    ("traffic", f"[{COUNT}, {COUNT}._replace(number='1')]", r"Connections\.number: str, not int"),
    ("traffic", f"[{COUNT}._replace(number=-1)]", r"Connections\.number: beyond 0"),
    ("traffic", f"[{COUNT}._replace(number=1 << 70)]", r"Connections\.number: beyond 0"),
    ("traffic", f"[{COUNT}._replace(failed=(1,))]", r"Connections\.failed: not 3 numbers"),
    ("traffic", f"[{COUNT}._replace(carried=(1, 2, 3, -4))]", r"Connections\.carried: a number bey"),
    ("relays", "[1]", "returned list, not .*frozenset"),
    ("relays", "frozenset('1')", "with str, not int"),
    ("reset_connections", "'2'", "returned str, not int"),
    ("wants_relays", "'no'", "returned str, not bool"),
    ("serves_on_loopback", "None", "returned NoneType, not bool"),
    ("watch", "object()", "returned object, not bool"),
    ("measure", "[1]", "with int, not Measurement"),
    ("measure", "[Measurement('a b', 'x', 'gauge', 1)]", "'a b', not a Prometheus name"),
    ("measure", "[Measurement('a', 'x', 'sum', 1)]", "'sum'"),
    ("measure", "[Measurement('a', 'x', 'gauge', '1')]", r"Measurement\.value: str, not float"),
    ("measure", "[Measurement('a', 'x', 'gauge', 1, {'b-c': ''})]", "'b-c', not a Prometheus name"),
    ("measure", "[Measurement('a', 'x', 'gauge', 1, {'b': 1})]", "a value that is int, not str"),
]


@pytest.mark.parametrize(("hook", "fault", "problem"), [
    *((hook, fault, problem) for hook in WORKING for fault, problem in RAISED.items()), *WRONG,
])
def test_work_that_fails_is_told_by_plugin_and_hook(
    faults: Path, caplog: pytest.LogCaptureFixture, hook: str, fault: str, problem: str
) -> None:
    registry, instance = made()
    (faults / hook).write_text(fault)
    called = "kproxy_sync" if hook == "sync" else hook
    told = rf"^plugin 'faulty backend': {called} .*{problem}"
    if hook in HARMLESS:
        assert WORKING[hook](instance) == HARMLESS[hook]
    else:
        with pytest.raises(PluginFailed, match=told):
            WORKING[hook](instance)
        with suppress(PluginFailed):
            WORKING[hook](instance)
    (failure,) = [one for one in registry.calls.measure() if one.value]
    assert failure.labels == {"plugin": "faulty backend", "hook": called}
    logged = [record for record in caplog.records if record.getMessage() == "plugin failed"]
    assert len(logged) == 1
    fields: Any = logged[0].__dict__["fields"]
    assert re.search(problem, fields["problem"])
    assert fields["problem"].isprintable()
    assert registry.make_backend("good", SETTINGS).sync(UPDATE).operations == 1


ASKED: dict[str, Callable[[Registry], object]] = {
    "kproxy_detect": lambda registry: registry.detect("faulty", SETTINGS).because,
    "kproxy_cleanup": lambda registry: registry.cleanup("faulty", SETTINGS, dry_run=True).errors,
    "kproxy_retire": lambda registry: registry.retire("faulty", SETTINGS).errors,
    "retire": lambda registry: registry.retire(
        "faulty", SETTINGS, instance=registry.make_backend("faulty", SETTINGS)).errors,
    "kproxy_supersede": lambda registry: registry.supersede("faulty", dry_run=True).errors,
    "kproxy_caveats": lambda registry: registry.caveats("faulty", UPDATE, SETTINGS),
    "kproxy_prepare": lambda registry: registry.prepare("faulty", SETTINGS),
    "kproxy_dialled": lambda registry: registry.dialled("faulty", Protocol.TCP, HERE, HERE),
    "kproxy_make_backend": lambda registry: start_backend(registry, "faulty", SETTINGS),
}


@pytest.mark.parametrize(("hook", "fault", "problem"), [
    *((hook, fault, problem) for hook in ASKED for fault, problem in RAISED.items()),
    ("kproxy_detect", "Detection('abc')", r"Detection\.requirements: str, not tuple"),
    ("kproxy_detect", "Detection((Requirement(1, 2, 3),))", r"Requirement\.what: int, not str"),
    ("kproxy_cleanup", "Leftovers(removed='abc')", r"Leftovers\.removed: str, not tuple"),
    ("kproxy_retire", "Leftovers(waiting='2')", r"Leftovers\.waiting: str, not int"),
    ("retire", "Leftovers(waiting='2')", r"Leftovers\.waiting: str, not int"),
    ("kproxy_supersede", "()", "returned tuple, not Leftovers"),
    ("kproxy_caveats", "[('what', None)]", "with tuple, not Caveat"),
    ("kproxy_dialled", "('10.0.0.1', 80)", "returned tuple, not Destination"),
    ("kproxy_make_backend", "object()", "returned object, not Backend"),
    ("kproxy_make_backend", "[]", "returned list, not Backend"),
    ("kproxy_make_backend", "None", "made no backend"),
])
def test_a_question_that_fails_is_told_by_plugin_and_hook(
    faults: Path, hook: str, fault: str, problem: str
) -> None:
    registry = Registry()
    registry.load_all()
    (faults / hook).write_text(fault)
    try:
        told = str(ASKED[hook](registry))
    except (PluginFailed, Unsupported) as error:
        told = str(error)
    except Exception as error:  # noqa: BLE001 - the registry's own refusal
        told = f"{type(error).__name__}: {error}"
        assert told.startswith("PluginRefused: the plugin for mode 'faulty' ")
    else:
        told = told.replace("\\\\", "\\")
    assert re.search(problem, told)
    assert "'faulty" in told
    assert told.isprintable()
    assert registry.detect("good", SETTINGS).usable
    assert registry.make_backend("good", SETTINGS).sync(UPDATE).operations == 1


def test_the_plugin_that_raised_is_told_from_its_wrappers(faults: Path, tmp_path: Path) -> None:
    wrapper = """
from kproxy_core.contract.hooks import hookimpl
raises = False
@hookimpl(wrapper=True)
def kproxy_sync(update):
    if raises:
        raise KeyError("observer")
    return (yield)
"""
    (tmp_path / "wrapping.py").write_text(wrapper)
    registry = Registry(plugins=["wrapping"])
    instance = registry.make_backend("faulty", SETTINGS)
    (faults / "sync").write_text("fail()")
    with pytest.raises(PluginFailed, match=r"^plugin 'faulty backend': kproxy_sync raised RuntimeError"):
        instance.sync(UPDATE)
    (faults / "sync").write_text("{}")
    with pytest.raises(PluginFailed, match=r"^plugin 'faulty backend or wrapping': kproxy_sync retur"):
        instance.sync(UPDATE)
    import wrapping  # type: ignore[import-not-found]

    wrapping.raises = True
    with pytest.raises(PluginFailed, match=r"^plugin 'wrapping': kproxy_sync raised KeyError"):
        instance.sync(UPDATE)


ON_TOP = """
class Made(LayeredBackend):
    def frontends(self, family):
        return [*self.base.frontends(family), 1]
"""


def test_the_base_that_raised_is_told_from_the_mode_on_top(faults: Path, tmp_path: Path) -> None:
    source = plugin("upper").replace("return Made()", "return Made(base)")
    source = source.replace('summary="a test"', 'summary="a test", base="faulty"')
    (tmp_path / "upper.py").write_text(source.partition("class Made")[0] + ON_TOP)
    instance = Registry(plugins=["upper"]).make_backend("upper", SETTINGS)
    with pytest.raises(PluginFailed, match=r"^plugin 'upper backend': frontends returned with int"):
        instance.frontends(Family.IPV4)
    for method in ("frontends", "sync", "render"):
        (faults / method).write_text("fail()")
        called = "kproxy_sync" if method == "sync" else method
        with pytest.raises(PluginFailed, match=rf"^plugin 'faulty backend': {called} raised RuntimeError"):
            WORKING[method](instance)


def test_a_base_is_closed_if_nothing_can_be_made_on_top_of_it(faults: Path, tmp_path: Path) -> None:
    source = plugin("upper").replace("return Made()", "raise Unsupported('not here')")
    (tmp_path / "upper.py").write_text(source.replace('summary="a test"', 'summary="a test", base="faulty"'))
    (faults / "close").write_text("fail()")
    registry = Registry(plugins=["upper"])
    with pytest.raises(Unsupported, match="not here"):
        registry.make_backend("upper", SETTINGS)
    (failure,) = registry.calls.measure()
    assert failure.labels == {"plugin": "faulty backend", "hook": "close"}


def test_measurements_of_other_plugins_are_kept(faults: Path, tmp_path: Path) -> None:
    observer = """
from kproxy_core.contract.values import Measurement
from kproxy_core.contract.hooks import hookimpl
@hookimpl
def kproxy_measure():
    yield Measurement("seen", "By an observer", "gauge", 1)
"""
    (tmp_path / "measuring.py").write_text(observer)
    instance = Registry(plugins=["measuring"]).make_backend("faulty", SETTINGS)
    (faults / "measure").write_text("fail()")
    assert instance.measure() == [(Measurement("seen", "By an observer", "gauge", 1),)]
    (faults / "measure").write_text("[Measurement('held', 'By the backend', 'gauge', 2)]")
    assert [each.name for found in instance.measure() for each in found] == ["held", "seen"]


def test_a_failure_is_logged_again_after_the_hook_has_worked(
    faults: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, instance = made()
    for fault in ("fail()", "fail()", "[]", "fail()"):
        (faults / "measure").write_text(fault)
        instance.measure()
    assert [record.getMessage() for record in caplog.records] == ["plugin failed"] * 2


def test_damage_of_a_wrong_type_is_not_passed_on(faults: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry, instance = made()
    heard: list[tuple[Family, str]] = []
    watched = sys.modules["faulty_plugin"].watched
    assert instance.watch(lambda family, what: heard.append((family, what)))
    wrong: list[tuple[object, ...]] = [([], "rules"), (Family.IPV4, None), (Family.IPV4,)]
    for given in (*wrong, (Family.IPV6, "rules")):
        watched[-1](*given)
    watched[-1](what="a map", family=Family.IPV4)
    watched[-1](Family.IPV4, why="a map")
    assert heard == [(Family.IPV6, "rules"), (Family.IPV4, "a map")]
    assert [one.value for one in registry.calls.measure()] == [4]
    reported = [record.__dict__["fields"]["problem"] for record in caplog.records]
    assert reported[:3] == [f"reported {found}, not Family and str" for found in (
        "list and str", "Family and NoneType", "Family")]


def test_every_method_is_declared_once_and_passed_on_with_its_types() -> None:
    for method in METHODS:
        of_backend = inspect.signature(getattr(Backend, method))
        assert inspect.signature(getattr(LayeredBackend, method)) == of_backend
        if method not in ("sync", "measure"):  # These ask observers, too.
            assert inspect.signature(getattr(BackendInstance, method)) == of_backend
    assert not inspect.isabstract(LayeredBackend)


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace() as found:
        yield found


def config(directory: Path) -> str:
    (directory / "manifests").mkdir()
    file = directory / "config.conf"
    file.write_text(json.dumps({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "faulty",
        "kproxy": {"stateDirectory": str(directory / "state"), "trafficMetrics": "service",
                   "manifests": str(directory / "manifests")},
    }))  # fmt: skip
    return f"--config={file}"


def await_problem(proxy: Proxy, wanted: str) -> None:
    """Wait until the health server names this problem, or with "" none."""
    deadline = time.monotonic() + PATIENCE
    while True:
        problems = json.loads(proxy.health()[1]).get("problems", [])
        if any(wanted in problem for problem in problems) if wanted else not problems:
            return
        assert time.monotonic() < deadline, problems
        time.sleep(0.05)


def test_a_proxy_goes_on_and_names_the_plugin(faults: Path, tmp_path: Path, node: Namespace) -> None:
    broken = {"watch": "fail()", "measure": "leave()", "traffic": "[1]", "relays": "odd()"}
    thread = "__import__('threading').Thread(target=fail).start() or True"
    for hook, fault in {**broken, "begin": thread, "close": "fail()"}.items():
        (faults / hook).write_text(fault)
    with running(node, config(tmp_path)) as proxy:
        proxy.await_health()
        (faults / "sync").write_text("None")
        (tmp_path / "manifests" / "dns.yaml").write_text(SERVICE)
        await_problem(proxy, "plugin 'faulty backend': kproxy_sync returned None")
        (faults / "sync").write_text("fail()")
        await_problem(proxy, "plugin 'faulty backend': kproxy_sync raised RuntimeError: a bug")
        (faults / "sync").unlink()
        await_problem(proxy, "")
        status, metrics = proxy.get(10249, "/metrics")
        assert status == 200
        failures = re.findall(r'kproxy_plugin_failures_total{hook="(\w+)",plugin="(.*)"} \d', metrics)
        assert sorted(failures) == [(hook, "faulty backend") for hook in sorted([*broken, "kproxy_sync"])]
        assert proxy.health()[0] == 200
        status, log = proxy.end()
    assert status == 0
    assert all(re.match(r"\d{4}-\d\d-\d\dT", line) for line in log.splitlines())
    assert all(line.isprintable() for line in log.splitlines())
    assert "unexpected exception in a thread" in log
    assert "plugin failed plugin=\"faulty backend\" hook=close" in log
    assert "foreign changes are found only by full syncs" in log

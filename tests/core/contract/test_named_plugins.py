"""Plugins that an operator loads or keeps out by name: -p, --plugin, and kproxy.plugins in the file."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_conformance.builders import full_update, node_view
from kproxy_core.config.flags import Flags
from kproxy_core.contract.registry import PluginNotFound, PluginRefused, Registry, UnknownMode, read_names
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family
from kproxy_core.modes.choice import conclude
from kproxy_core.modes.settings import Configuration
from tests.core.contract.test_registry import plugin
from tests.core.installed_plugins import install, on_path

SETTINGS = BackendSettings((Family.IPV4,))
KPROXY = Path(sys.executable).with_name("kproxy")

OBSERVER = '''
from kproxy_core.contract.hooks import hookimpl
seen = []
@hookimpl(wrapper=True, {order}=True)
def kproxy_sync(update):
    seen.append("{name} before")
    report = yield
    seen.append("{name} after")
    return report
'''


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A directory with the modes ``one`` and ``two``, and the observer ``watching``, installed."""
    install(tmp_path, "some", {"one": "some_one", "two": "some_two"},
            some_one=plugin("one", preference=2000), some_two=plugin("two", preference=1000),
            watching=OBSERVER.format(order="tryfirst", name="first"))  # fmt: skip
    with (tmp_path / "some-1.0.dist-info" / "entry_points.txt").open("a") as points:
        points.write("[kproxy.observers]\nwatching = watching\n")
    with on_path(tmp_path):
        yield tmp_path


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], {}),
        (["", " "], {}),
        (["a", "b.c", "no:d"], {"a": True, "b.c": True, "d": False}),
        (["no:a", "a"], {"a": True}),
        (["a", "no:a"], {"a": False}),
        (["a", "b", "a"], {"b": True, "a": True}),
    ],
)
def test_the_last_word_about_a_plugin_counts(words: list[str], named: dict[str, bool]) -> None:
    assert list(read_names(words).items()) == list(named.items())


def test_a_mode_that_is_kept_out_is_not_listed_chosen_or_loaded(here: Path) -> None:
    (here / "some_one.py").write_text("raise SystemExit('never import this')")
    registry = Registry(plugins=["no:one"])
    assert "one" not in registry.modes
    assert "one" not in {description.mode for description in registry.load_all()}
    assert conclude(Configuration(Flags({}), None), registry, SETTINGS.families).mode == "two"
    with pytest.raises(UnknownMode, match=r"mode 'one' is blocked by -p no:one; others: .*two"):
        registry.make_backend("one", SETTINGS)


def test_an_observer_is_kept_out_by_its_name(here: Path) -> None:
    assert "watching" in Registry().observers
    assert "watching" not in Registry(plugins=["no:watching"]).observers


def test_a_named_plugin_is_loaded_at_once_and_errors_are_reported(here: Path) -> None:
    assert list(Registry(plugins=["two"]).descriptions) == ["two"]
    (here / "some_one.py").write_text("import no_such_module_anywhere")
    with pytest.raises(PluginRefused, match=r"'one' of some 1.0 is not used.*no_such_module_anywhere"):
        Registry(plugins=["one"])


def test_a_module_that_is_not_installed_provides_its_mode(here: Path) -> None:
    (here / "third.py").write_text(plugin("three") + "\nclass object_in_it: pass\n")
    registry = Registry(plugins=["third"])
    assert "three" in registry.modes
    instance = registry.make_backend("three", SETTINGS)
    assert instance.render(full_update(node_view(), {})) == "rules"


def test_a_module_without_a_mode_observes_in_its_own_order(here: Path) -> None:
    (here / "outside.py").write_text(OBSERVER.format(order="tryfirst", name="second"))
    (here / "inside.py").write_text(OBSERVER.format(order="trylast", name="last"))
    registry = Registry(plugins=["outside", "inside"])
    instance = registry.make_backend("one", SETTINGS)
    instance.sync(full_update(node_view(), {}))
    import inside  # type: ignore[import-not-found]
    import outside  # type: ignore[import-not-found]

    assert outside.seen == ["second before", "second after"]
    assert inside.seen == ["last before", "last after"]
    impls = [impl.plugin_name for impl in instance.hook.kproxy_sync.get_hookimpls()]
    # pluggy calls the last one first: what was registered later with tryfirst is outermost.
    wrappers = [name for name in impls if name in ("inside", "watching", "outside")]
    assert wrappers == ["inside", "watching", "outside"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (plugin("one"), "mode 'one' is provided by another plugin"),
        (plugin("new", contract="(9, 0)"), "it was written for contract 9.0"),
        (plugin("new").replace("def kproxy_cleanup", "def x"), "it has a hook x, unknown"),
        ("nothing = 1", "it has none of kproxy's hooks"),
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    ],
)
def test_a_module_that_does_not_fit_is_refused(here: Path, source: str, problem: str) -> None:
    (here / "stranger.py").write_text(source)
    with pytest.raises(PluginRefused, match=r"^plugin 'stranger' can't be used: ") as refused:
        Registry(plugins=["stranger"])
    assert problem in str(refused.value)


@pytest.mark.parametrize("name", ["no_such_thing", "os.no_such_thing", "two words", "-x", "a..b"])
def test_an_unknown_plugin_is_reported_with_the_known_ones(here: Path, name: str) -> None:
    with pytest.raises(PluginNotFound, match=r"there is no plugin '.*installed ones are: .*one.*two"):
        Registry(plugins=[name])


def kproxy(*arguments: str, path: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [KPROXY, *arguments], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(path)}
    )


def test_plugins_are_named_by_flags_and_the_file(here: Path) -> None:
    listed = kproxy("modes", "-p", "no:one", "--plugin=no:watching", path=here)
    assert "two" in listed.stdout
    assert "one  " not in listed.stdout
    unknown = kproxy("modes", "-p", "no_such_thing", path=here)
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("Error: there is no plugin 'no_such_thing'")
    file = here / "config.yaml"
    file.write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
        "mode: one\nkproxy: {plugins: ['no:one', 'no:two']}\n"
    )
    render = ("render", "--config", str(file), "--manifests", str(here))
    assert "blocked by -p no:one" in kproxy(*render, path=here).stderr
    assert kproxy(*render, "-p", "one", path=here).returncode == 0


def test_a_mode_that_is_kept_out_is_not_cleaned_up_after(here: Path) -> None:
    ours = "no:nftables,no:iptables,no:ipvs,no:userspace"
    cleaned = kproxy("--cleanup", "--dry-run", "-p", ours, "-p", "no:one", path=here)
    assert cleaned.stdout == "two: what was left would be removed\n"


def test_a_mode_without_text_is_not_rendered(here: Path) -> None:
    (here / "some_one.py").write_text(plugin("one").replace("def render", "def other"))
    done = kproxy("render", "--mode=one", f"--manifests={here}", path=here)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Error: mode one has no rules as text\n" in done.stderr

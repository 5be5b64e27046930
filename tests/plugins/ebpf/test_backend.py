"""The backend around a base that succeeds or fails, with the real maps and programs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import kproxy_bpf
from kproxy_conformance.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_core.contract import Backend, BackendSettings, Scope, SyncFailed, SyncReport, TrustLost, Update
from kproxy_core.model.address import Family
from kproxy_ebpf import names
from kproxy_ebpf.backend import EbpfBackend
from kproxy_ebpf.batch import frontend_family
from kproxy_ebpf.kernel import bpf
from kproxy_ebpf.kernel.programs import Compilation, Compiled, Program
from kproxy_ebpf.settings import Settings
from tests.plugins.ebpf.node import until

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")
NODE6 = node_view("node1", family=Family.IPV6, pods="fd00:244::/64", node_port_addresses="2001:db8::1")
V4 = full_update(NODE, plans(NODE, service(), endpoint_slice("web", "10.244.2.1")))
OTHER_V4 = full_update(NODE, plans(NODE, service(), endpoint_slice("web", "10.244.2.2")))
V6 = full_update(NODE6, plans(NODE6, service(ip="fd00:96::1"), endpoint_slice("web", "fd00:244:2::1")))


def with_another_layout(compiled: Compiled) -> Compiled:
    hash_, lru_hash = 1, compiled.maps[names.PINS]
    return compiled._replace(maps={**compiled.maps, names.PINS: lru_hash._replace(type=hash_)})


class Rules(Backend):
    """A base that programs nothing, and fails once if told to."""

    problem: Exception | None = None

    def begin(self) -> bool:
        return True

    def sync(self, update: Update) -> SyncReport:
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem
        return SyncReport(0)


@contextmanager
def begun(settings: Settings) -> Iterator[EbpfBackend]:
    options = {"cgroup": settings.cgroup, "pinDirectory": settings.pin_directory}
    made = EbpfBackend(Rules(), BackendSettings((Family.IPV4, Family.IPV6), options=options))
    assert made.begin()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def backend(settings: Settings) -> Iterator[EbpfBackend]:
    with begun(settings) as made:
        yield made


def sync_with_failing_base(
    backend: EbpfBackend, update: Update, error: type[Exception] = SyncFailed
) -> None:
    assert isinstance(backend.base, Rules)
    backend.base.problem = error("no")
    with pytest.raises(error):
        backend.sync(update)


def is_attached(backend: EbpfBackend) -> bool:
    return bool(backend.measure()[0].value)


def test_a_family_whose_rules_fail_does_not_stop_the_other(backend: EbpfBackend) -> None:
    sync_with_failing_base(backend, V6)
    assert not is_attached(backend)
    backend.sync(V4)
    assert is_attached(backend)
    sync_with_failing_base(backend, V6)
    change = replace(V4, scope=Scope.CHANGED)
    assert backend.sync(change) == SyncReport(0)
    assert backend.sync(V6) != SyncReport(0)


REMOVAL = replace(V4, scope=Scope.CHANGED, changed=dict.fromkeys(V4.changed), plans={})


def test_a_change_that_the_rules_refuse_leaves_the_maps_as_they_were(backend: EbpfBackend) -> None:
    backend.sync(V4)
    sync_with_failing_base(backend, REMOVAL)
    assert backend.sync(V4) == SyncReport(0)
    assert backend.sync(REMOVAL) != SyncReport(0)
    assert backend.sync(REMOVAL) == SyncReport(0)


@pytest.mark.parametrize("error", [TrustLost, KeyError])
def test_when_the_rules_are_unknown_the_maps_are_read_again(
    backend: EbpfBackend, error: type[Exception]
) -> None:
    backend.sync(V4)
    sync_with_failing_base(backend, REMOVAL, error)
    assert backend.sync(V4) != SyncReport(0)
    assert backend.sync(V4) == SyncReport(0)
    sync_with_failing_base(backend, REMOVAL, error)
    assert backend.sync(REMOVAL) == SyncReport(0)
    assert backend.sync(V4) != SyncReport(0)


def is_choosing(settings: Settings) -> bool:
    """Return whether the kernel runs programs that choose endpoints."""
    cgroup = os.open(settings.cgroup, os.O_RDONLY)
    try:
        return any(bpf.attached(cgroup, names.ATTACH_TYPES[name]) for name in names.ON_THE_WAY_OUT)
    finally:
        os.close(cgroup)


def frontends(settings: Settings) -> set[Family]:
    """Return the families of which the pinned maps have frontends."""
    (path,) = Path(settings.pin_directory).glob(f"*/maps-*/{names.FRONTENDS}")
    found = bpf.open_pin(str(path))
    try:
        return {frontend_family(key) for key, _ in bpf.elements(found, bpf.map_definition(found))}
    finally:
        os.close(found)


def refuse_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError("the verifier says no")

    monkeypatch.setattr("kproxy_ebpf.kernel.programs.load_program", refuse)


def refuse_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse the last link of each attempt, when the others run new programs already."""
    calls = count(1)

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: int) -> Any:
            if next(calls) % len(names.PROGRAMS) == 0:
                raise OSError("no memory")
            return real(*arguments)

        return call

    monkeypatch.setattr("kproxy_ebpf.kernel.bpf.update_link", refusing(bpf.update_link))
    monkeypatch.setattr("kproxy_ebpf.kernel.bpf.create_link", refusing(bpf.create_link))


def refuse_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("kproxy_ebpf.kernel.bpf.update_all", refuse)


@pytest.mark.parametrize("refuse", [refuse_programs, refuse_links, refuse_elements])
def test_what_an_earlier_process_attached_is_detached_until_it_is_replaced(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with begun(settings) as before:
        before.sync(V4)
        before.sync(V6)
        assert is_choosing(settings)
    monkeypatch.setattr("kproxy_ebpf.backend._FIRST_DELAY", 0.0)
    with begun(settings) as after:
        descriptors = set(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as now:
            refuse(now)
            for update in (OTHER_V4, V6, OTHER_V4):
                report = after.sync(update)
                assert report.operations == 0
                assert "no memory" in report.degraded or "the verifier says no" in report.degraded
                assert not is_choosing(settings)
                assert not is_attached(after)
            assert set(os.listdir("/proc/self/fd")) == descriptors
        change = replace(OTHER_V4, scope=Scope.CHANGED, changed={})
        assert after.sync(change).degraded == ""
        assert is_choosing(settings)
        assert is_attached(after)
        # The rules of the other family may be newer than its elements.
        assert frontends(settings) == {Family.IPV4}
        after.sync(replace(V6, scope=Scope.CHANGED, changed={}))
        assert frontends(settings) == set(Family)
        assert after.sync(OTHER_V4) == after.sync(V6) == SyncReport(0)


@pytest.mark.parametrize("refuse", [refuse_programs, refuse_links, refuse_elements])
def test_an_upgrade_that_fails_leaves_no_maps(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with begun(settings) as before:
        before.sync(V4)
    made = list(Path(settings.pin_directory).glob("*/maps-*"))
    monkeypatch.setattr("kproxy_ebpf.backend._FIRST_DELAY", 0.0)
    with begun(settings) as after:
        real = Compilation.result
        monkeypatch.setattr(Compilation, "result", lambda *args: with_another_layout(real(*args)))
        with monkeypatch.context() as now:
            refuse(now)
            assert after.sync(V4).degraded
            assert list(Path(settings.pin_directory).glob("*/maps-*")) == made
        assert not after.sync(V4).degraded
        (replaced,) = Path(settings.pin_directory).glob("*/maps-*")
        assert replaced not in made


def test_programs_are_detached_while_the_compiler_runs(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with begun(settings) as before:
        before.sync(V4)
    script, may_end = tmp_path / "compile.py", tmp_path / "may-end"
    script.write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(may_end)!r}).exists(): time.sleep(0.01)\n"
        + kproxy_bpf.COMPILER.read_text()
    )
    monkeypatch.setattr("kproxy_ebpf.backend.Compilation", partial(Compilation, script=script))
    monkeypatch.setattr("kproxy_ebpf.backend._PATIENCE", 0.01)
    with begun(settings) as after:
        for _ in range(2):
            assert "being compiled" in after.sync(V4).degraded
            assert not is_choosing(settings)
        may_end.touch()
        until(lambda: not after.sync(V4).degraded)
        assert is_choosing(settings)


Ship = Callable[[Compiled], None]


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ship:
    """Have the wheel contain the given programs, and the cache none."""
    def ship_programs(programs: Compiled) -> None:
        directory = tmp_path / "shipped"
        directory.mkdir()
        name = kproxy_bpf.file_name(tuple(names.KINDS), names.MAPS)
        (directory / name).write_bytes(msgspec.json.encode(programs))
        found = partial(Compilation, str(tmp_path / "cache"))

        def compilation(*, shipped: Path | None = directory) -> Compilation:
            return found(shipped=shipped)

        monkeypatch.setattr("kproxy_ebpf.backend.Compilation", compilation)
        monkeypatch.setattr("kproxy_ebpf.detect.Compilation", partial(found, shipped=directory))

    return ship_programs


def refused(compiled: Compiled) -> Compiled:
    """Return *compiled* with a program that no kernel accepts."""
    return compiled._replace(programs={**compiled.programs, "connect6": Program(bytes(8), ())})


def without_bcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy_core.linux.packages.interpreters", lambda binding: [])


def test_programs_that_were_built_with_kproxy_need_no_compiler(
    settings: Settings, compiled: Compiled, ship: Ship, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(compiled)
    without_bcc(monkeypatch)
    with begun(settings) as backend:
        assert not backend.sync(V4).degraded
        assert is_attached(backend)


def test_a_kernel_that_refuses_the_built_programs_gets_compiled_ones(
    settings: Settings, compiled: Compiled, ship: Ship, caplog: pytest.LogCaptureFixture
) -> None:
    ship(refused(compiled))
    for start in ("first", "restart"):
        with begun(settings) as backend:
            assert not backend.sync(V4).degraded, start
            assert is_attached(backend)
    assert caplog.messages.count("compiling the BPF programs on this machine") == 2


def test_a_kernel_that_refuses_the_built_programs_is_named_where_nothing_compiles(
    settings: Settings, compiled: Compiled, ship: Ship, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(refused(compiled))
    monkeypatch.setattr("kproxy_ebpf.backend._FIRST_DELAY", 0.0)
    with begun(settings) as backend:
        with monkeypatch.context() as now:
            without_bcc(now)
            for _ in range(2):
                said = backend.sync(V4).degraded
                assert "the kernel refuses connect6" in said
                assert "python3-bpfcc" in said
        assert not backend.sync(V4).degraded, "bcc was installed meanwhile"

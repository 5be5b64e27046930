"""Maps, programs and pins in the real kernel."""

import errno
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kproxy_conformance.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_conformance.open_files import open_files
from kproxy_core.contract.errors import SyncFailed, TrustLost
from kproxy_core.contract.values import BackendSettings, Update
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Family
from kproxy_ebpf import names
from kproxy_ebpf.batch import CONNECTED_UDP, client_key
from kproxy_ebpf.cleanup import GRACE, cleanup, retire
from kproxy_ebpf.detect import lacking
from kproxy_ebpf.family import FamilyState
from kproxy_ebpf.kernel import bpf, maps
from kproxy_ebpf.kernel.maps import Kernel, pinned_maps
from kproxy_ebpf.kernel.programs import Compilation, Compiled
from kproxy_ebpf.settings import Settings
from tests.core.namespaces import Namespace, namespace
from tests.deploy.objects import DEPLOY
from tests.plugins.ebpf.node import until
from tests.plugins.ebpf.test_backend import with_another_layout

V4 = Family.IPV4
NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")
NODE6 = node_view("node1", family=Family.IPV6, pods="fd00:244::/64", node_port_addresses="2001:db8::1")
UPDATE = full_update(
    NODE, plans(NODE, service("web", "80@30080"), endpoint_slice("web", "10.244.2.1", "10.244.2.2"))
)
UPDATE6 = full_update(
    NODE6, plans(NODE6, service("web", "80@30080", ip="fd00:96::1"), endpoint_slice("web", "fd00:244:2::1"))
)
MANY = tuple(f"10.244.2.{number}" for number in range(1, 10))
GROWN = full_update(NODE, plans(NODE, service("web", "80@30080"), endpoint_slice("web", *MANY)))


@pytest.fixture
def kernel(settings: Settings, compiled: Compiled) -> Iterator[Kernel]:
    made = Kernel(settings, counting=names.COUNTING)
    made.open(compiled)
    yield made
    made.close()


def sync(kernel: Kernel, update: Update = UPDATE) -> int:
    state = FamilyState(update.family, kernel)
    return state.write(update, state.withdraw(update))


def backend_settings(settings: Settings) -> BackendSettings:
    return BackendSettings(
        tuple(Family), options={"cgroup": settings.cgroup, "pinDirectory": settings.pin_directory}
    )


def links(settings: Settings) -> Path:
    return next(Path(settings.pin_directory).glob("*/links"))


def attached(settings: Settings) -> dict[str, int]:
    """Return the number of programs of the cgroup at each attach point but for connected UDP sockets."""
    kinds = {name: names.KINDS[name][1] for name in (*names.PROGRAMS, *names.COUNTING)}
    cgroup = os.open(settings.cgroup, os.O_RDONLY)
    try:
        return {name: len(bpf.attached(cgroup, kind)) for name, kind in kinds.items()}
    finally:
        os.close(cgroup)


def test_a_second_full_sync_writes_nothing(kernel: Kernel, settings: Settings) -> None:
    assert sync(kernel) > 0
    kernel.attach()
    assert sync(kernel) == 0
    assert set(attached(settings).values()) == {1}
    assert kernel.problem() == ""


def test_a_restart_finds_its_maps_and_replaces_the_programs(
    kernel: Kernel, settings: Settings, compiled: Compiled
) -> None:
    sync(kernel)
    kernel.attach()
    kernel.close()
    assert set(attached(settings).values()) == {1}
    again = Kernel(settings, counting=names.COUNTING)
    again.open(compiled)
    try:
        assert sync(again) == 0
        again.attach()
        assert again.problem() == ""
        assert set(attached(settings).values()) == {1}
    finally:
        again.close()


def test_a_restart_attaches_what_it_counts(kernel: Kernel, settings: Settings, compiled: Compiled) -> None:
    kernel.attach()
    kernel.close()
    for counting in ((names.OUTCOMES,), (), names.COUNTING):
        again = Kernel(settings, counting=counting)
        again.open(compiled)
        try:
            again.attach()
            found = {name for name, number in attached(settings).items() if number}
            assert found == {*names.PROGRAMS, *counting}
        finally:
            again.close()


def test_a_new_layout_of_the_maps_replaces_the_old_one(
    kernel: Kernel, settings: Settings, compiled: Compiled
) -> None:
    sync(kernel)
    kernel.attach()
    again = Kernel(settings, counting=names.COUNTING)
    again.open(with_another_layout(compiled))
    try:
        assert sync(again) > 0
        again.attach()
        assert len(list(links(settings).parent.glob("maps-*"))) == 1
        assert set(attached(settings).values()) == {1}
    finally:
        again.close()


def detach(settings: Settings, program: str = "connect4") -> None:
    link = bpf.open_pin(str(links(settings) / program))
    bpf.detach_link(link)
    os.close(link)


def remove_pin(settings: Settings) -> None:
    (links(settings) / "connect4").unlink()


def remove_all_pins(settings: Settings) -> None:
    shutil.rmtree(settings.pin_directory)


def remove_map(settings: Settings) -> None:
    next(Path(settings.pin_directory).glob(f"*/maps-*/{names.SLOTS}")).unlink()


def detach_what_counts_packets(settings: Settings) -> None:
    detach(settings, "egress")


@pytest.mark.parametrize(
    "damage", [detach, detach_what_counts_packets, remove_pin, remove_all_pins, remove_map])
def test_damage_by_others_is_noticed_and_repaired(
    kernel: Kernel, settings: Settings, damage: Callable[[Settings], None]
) -> None:
    kernel.attach()
    damage(settings)
    assert "BPF" in kernel.problem()
    kernel.attach()
    assert kernel.problem() == ""
    assert set(attached(settings).values()) == {1}


def test_programs_that_read_other_maps_than_are_written_are_noticed_and_replaced(
    kernel: Kernel, compiled: Compiled
) -> None:
    sync(kernel)
    kernel.attach()
    os.close(kernel._maps[names.SLOTS])
    kernel._maps[names.SLOTS] = bpf.create_map("other", compiled.maps[names.SLOTS])
    assert "reads other maps" in kernel.problem()
    kernel.attach()
    assert kernel.problem() == ""


def test_elements_changed_by_others_are_repaired_by_a_full_sync(kernel: Kernel, settings: Settings) -> None:
    sync(kernel)
    path = next(Path(settings.pin_directory).glob(f"*/maps-*/{names.FRONTENDS}"))
    frontends = bpf.open_pin(str(path))
    found = dict(bpf.elements(frontends, bpf.map_definition(frontends)))
    bpf.delete_all(frontends, list(found)[:1])
    bpf.update(frontends, bytes(10) + b"\xff\xff" + bytes(12), bytes(24))
    assert sync(kernel) == 2
    assert dict(bpf.elements(frontends, bpf.map_definition(frontends))) == found
    os.close(frontends)


def test_programs_of_others_are_kept(kernel: Kernel, settings: Settings, compiled: Compiled) -> None:
    definitions = {name: bpf.create_map("other", made) for name, made in compiled.maps.items()}
    other = compiled.load("connect4", definitions)
    cgroup = os.open(settings.cgroup, os.O_RDONLY)
    link = bpf.create_link(other, cgroup, names.ATTACH_TYPES["connect4"])
    kernel.attach()
    assert attached(settings)["connect4"] == 2
    cleanup(backend_settings(settings), dry_run=False)
    assert attached(settings)["connect4"] == 1
    for descriptor in (link, cgroup, other, *definitions.values()):
        os.close(descriptor)


def test_a_clean_up_leaves_nothing_and_a_dry_run_says_the_same(kernel: Kernel, settings: Settings) -> None:
    sync(kernel)
    kernel.attach()
    dry = cleanup(backend_settings(settings), dry_run=True)
    assert set(attached(settings).values()) == {1}
    assert dry.removed
    assert cleanup(backend_settings(settings), dry_run=False) == dry
    assert set(attached(settings).values()) == {0}
    assert list(Path(settings.pin_directory).iterdir()) == []
    assert cleanup(backend_settings(settings), dry_run=False).removed == ()


def test_a_clean_up_leaves_no_object_in_the_kernel(settings: Settings, compiled: Compiled) -> None:
    kernel = Kernel(settings, counting=names.COUNTING)
    kernel.open(compiled)
    sync(kernel)
    kernel.attach()
    made = [
        *((_PROGRAM_BY_ID, _id(fd)) for fd in kernel._programs.values()),
        *((_MAP_BY_ID, _id(fd)) for fd in kernel._maps.values()),
    ]
    kernel.close()
    assert all(_exists(*one) for one in made)
    cleanup(backend_settings(settings), dry_run=False)
    until(lambda: not any(_exists(*one) for one in made))


_PROGRAM_BY_ID, _MAP_BY_ID = 13, 14


def _id(fd: int) -> int:
    return int.from_bytes(bpf._info(fd)[4:8], sys.byteorder)


def _exists(command: int, identity: int) -> bool:
    try:
        os.close(bpf._call(command, identity.to_bytes(4, sys.byteorder))[0])
    except FileNotFoundError:
        return False
    return True


def test_retiring_detaches_at_once_and_translates_late_replies(
    kernel: Kernel, settings: Settings
) -> None:
    kernel.attach()
    now = 100.0
    assert retire(backend_settings(settings), lambda: now).in_grace
    assert {name for name, count in attached(settings).items() if count} == set(names.ON_THE_WAY_BACK)
    now += GRACE
    assert not retire(backend_settings(settings), lambda: now).is_needed


@pytest.mark.parametrize("remove", ["retire", "cleanup"])
def test_a_process_that_may_not_call_bpf_ends_the_programs_of_an_earlier_one(
    settings: Settings, compiled: Compiled, remove: str
) -> None:
    """As a pod without CAP_BPF that serves in another mode."""
    kernel = Kernel(settings, counting=names.COUNTING)
    kernel.open(compiled)
    kernel.attach()
    kernel.close()
    call = "retire(settings)" if remove == "retire" else "cleanup(settings, dry_run=False)"
    program = (
        "from kproxy_core.contract.values import BackendSettings\n"
        f"from kproxy_ebpf.cleanup import {remove}\n"
        "from tests.deploy import seccomp\n"
        f"settings = BackendSettings((), options={backend_settings(settings).options!r})\n"
        "seccomp._REFUSED += 'bpf',\n"
        f"seccomp.load(seccomp.Path({str(DEPLOY / 'seccomp/kproxy-ebpf.json')!r}))\n"
        f"found = {call}\n"
        "assert found.removed and not found.errors, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=DEPLOY.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    until(lambda: not any(attached(settings)[name] for name in (*names.ON_THE_WAY_OUT, *names.COUNTING)))


def with_tables_of_an_older_kproxy(node: Namespace) -> None:
    """Write what the option ``notrack`` of kproxy 0.2 left, and a table of another program."""
    node.nft("add table ip kproxy-notrack; add table ip6 kproxy-notrack; add table ip other")


def test_a_clean_up_removes_the_tables_of_an_older_kproxy(settings: Settings) -> None:
    with namespace() as node:
        with_tables_of_an_older_kproxy(node)
        before = node.run("nft", "list", "tables")
        for dry_run, after in (True, before), (False, "table ip other\n"):
            found = node.inside(partial(cleanup, backend_settings(settings), dry_run=dry_run))
            assert found.removed == ("table ip kproxy-notrack", "table ip6 kproxy-notrack")
            assert node.run("nft", "list", "tables") == after


def test_a_start_removes_the_tables_of_an_older_kproxy(settings: Settings, compiled: Compiled) -> None:
    def program() -> None:
        kernel = Kernel(settings)
        kernel.open(compiled)
        sync(kernel)
        kernel.attach()
        kernel.close()

    with namespace() as node:
        with_tables_of_an_older_kproxy(node)
        node.inside(program)
        assert node.run("nft", "list", "tables") == "table ip other\n"


@pytest.mark.parametrize(("problem", "translated"), [("", True), ("no CONFIG_INET_DIAG_DESTROY", False)])
def test_connected_udp_is_left_to_the_rules_where_sockets_cannot_be_destroyed(
    settings: Settings, compiled: Compiled, monkeypatch: pytest.MonkeyPatch, problem: str, translated: bool
) -> None:
    monkeypatch.setattr("kproxy_ebpf.kernel.maps.udp_destruction_problem", lambda: problem)
    kernel = Kernel(settings._replace(connected_udp=True))
    kernel.open(compiled)
    try:
        kernel.configure(NODE)
        (path,) = Path(settings.pin_directory).glob(f"*/maps-*/{names.SETTINGS}")
        found = bpf.open_pin(str(path))
        ((_, value),) = bpf.elements(found, bpf.map_definition(found))
        os.close(found)
        assert bool(value[8] & CONNECTED_UDP) is translated
    finally:
        kernel.close()


def test_a_missing_cgroup_is_named(settings: Settings, compiled: Compiled) -> None:
    kernel = Kernel(settings._replace(cgroup="/sys/fs/cgroup/does-not-exist"))
    with pytest.raises(SyncFailed, match="does-not-exist"):
        kernel.open(compiled)


def with_small_maps(compiled: Compiled) -> Compiled:
    small = {name: compiled.maps[name]._replace(entries=2) for name in names.PER_FAMILY}
    return compiled._replace(maps={**compiled.maps, **small})


def test_a_full_map_grows_and_keeps_what_it_had(settings: Settings, compiled: Compiled) -> None:
    kernel, again = Kernel(settings), Kernel(settings)
    kernel.open(with_small_maps(compiled))
    try:
        sync(kernel, UPDATE6)
        kernel.attach()
        of_the_other_family = kernel.contents(Family.IPV6)
        sync(kernel, GROWN)
        assert kernel.problem() == ""
        assert len(kernel.contents(V4)[names.SLOTS]) == len(MANY)
        assert kernel.contents(Family.IPV6) == of_the_other_family
        again.open(with_small_maps(compiled))
        assert sync(again, GROWN) == sync(again, UPDATE6) == 0
    finally:
        again.close()
        kernel.close()


STICKY = full_update(NODE, plans(
    NODE, service("web", "80@30080", affinity=10800), endpoint_slice("web", "10.244.2.1")))  # fmt: skip


def clients(seen: Iterable[int]) -> dict[bytes, bytes]:
    """Return map elements of clients that were seen at these seconds."""
    return {
        client_key(number, bytes(8)): (second * 10**9).to_bytes(8, sys.byteorder) + bytes(24)
        for number, second in enumerate(seen)
    }


def add_clients(kernel: Kernel, seen: Iterable[int]) -> dict[bytes, bytes]:
    """Add clients as the programs do, and return their map elements."""
    elements = clients(seen)
    bpf.update_all(kernel._maps[names.PINS], elements)
    bpf.update(kernel._maps[names.PINNED], bytes(4), len(elements).to_bytes(8, sys.byteorder))
    return elements


def entries_for_clients(kernel: Kernel) -> int:
    return bpf.map_definition(kernel._maps[names.PINS]).entries


def test_the_map_of_clients_with_affinity_grows_before_it_forgets_one(
    kernel: Kernel, settings: Settings
) -> None:
    sync(kernel, STICKY)
    kernel.attach()
    before = entries_for_clients(kernel)
    add_clients(kernel, [10800] * (before // 2 - 1))
    kernel.make_room_for_clients()
    assert entries_for_clients(kernel) == before
    added = add_clients(kernel, [10800] * (before // 2))
    kernel.make_room_for_clients()
    assert entries_for_clients(kernel) == 2 * before
    assert kernel.problem() == ""
    with pinned_maps(settings) as maps:
        assert maps is not None
        assert dict(maps.elements(names.PINS)) == added


def test_clients_that_were_away_for_the_timeout_need_no_room(kernel: Kernel) -> None:
    sync(kernel, STICKY)
    kernel.attach()
    before = entries_for_clients(kernel)
    add_clients(kernel, [1] * (before // 2) + [10801] * (before // 4))
    kernel.make_room_for_clients()
    assert entries_for_clients(kernel) == before


def test_the_map_of_clients_with_affinity_is_bounded(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(maps, "MOST_CLIENTS", 65536)
    sync(kernel, STICKY)
    add_clients(kernel, [1] * 40000)
    kernel.make_room_for_clients()
    assert entries_for_clients(kernel) == 65536
    assert "clients with session affinity may be forgotten" in caplog.text
    caplog.clear()
    kernel.make_room_for_clients()
    assert caplog.text == ""


def test_a_batch_that_lacks_memory_for_a_moment_goes_on_where_it_stopped(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes without preallocation refill their free list from an interrupt (Linux 6.1 and later)."""
    batch, calls = bpf._batch, itertools.count()

    def batch_of_one(
        command: int, fd: int, keys: Any, count: int, *rest: Any, **more: Any
    ) -> tuple[int, int]:
        if command != bpf._UPDATE_BATCH or count == 1:
            return batch(command, fd, keys, count, *rest, **more)
        if next(calls) % 2:
            return 0, errno.ENOMEM
        return batch(command, fd, keys, 1, *rest, **more)[0], errno.ENOMEM

    monkeypatch.setattr(bpf, "_batch", batch_of_one)
    assert sync(kernel) > 0
    assert next(calls) > 2
    monkeypatch.undo()
    assert sync(kernel) == 0


def test_lasting_lack_of_memory_is_an_error(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = bpf._batch

    def no_memory(command: int, *rest: Any, **more: Any) -> tuple[int, int]:
        return (0, errno.ENOMEM) if command == bpf._UPDATE_BATCH else batch(command, *rest, **more)

    monkeypatch.setattr(bpf, "_ALLOCATION_PATIENCE", 0.01)
    monkeypatch.setattr(bpf, "_batch", no_memory)
    with pytest.raises(TrustLost, match="Cannot allocate memory"):
        sync(kernel)
    monkeypatch.undo()
    assert sync(kernel) > 0
    assert sync(kernel) == 0


def test_a_deletion_goes_on_after_a_key_that_is_missing() -> None:
    definition = bpf.MapDefinition(type=1, key=4, value=4, entries=8, flags=0)
    made = bpf.create_map("kproxy_test", definition)
    keys = [number.to_bytes(4, "little") for number in range(5)]
    bpf.update_all(made, dict.fromkeys((keys[0], keys[1], keys[3], keys[4]), bytes(4)))
    bpf.delete_all(made, keys[:4])
    assert dict(bpf.elements(made, definition)) == {keys[4]: bytes(4)}
    os.close(made)


def test_programs_load_with_the_capabilities_of_the_deployed_pod(tmp_path: Path, compiled: Compiled) -> None:
    program = (
        "from kproxy_ebpf.kernel import bpf; from kproxy_ebpf.kernel.programs import Compilation as C\n"
        f"c = C({str(tmp_path)!r}).result()\n"
        "m = {name: bpf.create_map('kproxy_test', made) for name, made in c.maps.items()}\n"
        "print(*sorted(name for name in c.programs if c.load(name, m)))"
    )
    allowed = "-all,+bpf,+net_admin"
    done = subprocess.run(
        ["setpriv", f"--bounding-set={allowed}", f"--inh-caps={allowed}", sys.executable, "-c", program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == sorted(compiled.programs), done.stderr


def test_programs_compile_without_kernel_and_system_headers(tmp_path: Path, compiled: Compiled) -> None:
    program = f"from kproxy_ebpf.kernel.programs import Compilation as C; C({str(tmp_path)!r}).result()"
    hide = "for d in /usr/src /usr/include /lib/modules; do [ ! -d $d ] || mount -t tmpfs none $d; done"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", f'{hide}; ! ls /usr/include/* && exec "$@"', "sh",
         sys.executable, "-c", program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Compilation(str(tmp_path), start=False).result() == compiled


def test_a_cached_result_needs_no_compiler(tmp_path: Path, compiled: Compiled) -> None:
    Compilation(str(tmp_path)).result()
    again = Compilation(str(tmp_path), start=False)
    assert again.is_done
    assert again.result() == compiled


@pytest.mark.parametrize("content", [b"{}", b"[", b'[{"\xff": []}, {}]'], ids=repr)
def test_a_damaged_cache_is_compiled_again(tmp_path: Path, compiled: Compiled, content: bytes) -> None:
    Compilation(str(tmp_path)).result()
    next(tmp_path.iterdir()).write_bytes(content)
    assert Compilation(str(tmp_path)).result() == compiled


@pytest.mark.parametrize(("script", "problem"), [
    ("raise SystemExit('no LLVM here')", "no LLVM here"),
    ("import os; os.kill(os.getpid(), 9)", "could not be compiled: -9"),
    ("import time; time.sleep(60)", "did not finish in 0.5 s"),
])  # fmt: skip
def test_a_compiler_that_fails_says_why(tmp_path: Path, script: str, problem: str) -> None:
    path = tmp_path / "compile.py"
    path.write_text(script)
    timeout = 0.5 if "sleep" in script else 60.0
    with pytest.raises(HostError, match=problem):
        Compilation(str(tmp_path / "cache"), script=path, timeout=timeout).result()


def test_a_machine_without_bcc_is_told_what_to_install(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kproxy_ebpf.detect.Compilation", partial(Compilation, str(tmp_path)))
    monkeypatch.setattr("kproxy_core.linux.packages.interpreters", lambda binding: [])
    assert [problem for problem in lacking(settings) if "python3-bpfcc" in problem]


def test_the_compiler_needs_no_more_than_200_mib(tmp_path: Path) -> None:
    program = (
        "import resource; from kproxy_ebpf.kernel.programs import Compilation as C\n"
        f"C({str(tmp_path)!r}).result(); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200 * 1024


def test_a_closed_kernel_holds_no_descriptor(settings: Settings, compiled: Compiled) -> None:
    before = open_files(os.getpid())
    kernel = Kernel(settings)
    kernel.open(compiled)
    kernel.close()
    # Files of earlier tests may be closed meanwhile.
    assert not open_files(os.getpid()).items() - before.items()


@pytest.mark.parametrize("missing", [names.SLOTS, names.CONNECTIONS])
def test_a_reader_of_pinned_maps_of_which_one_is_missing_holds_no_descriptor(
    kernel: Kernel, settings: Settings, missing: str
) -> None:
    next(Path(settings.pin_directory).glob(f"*/maps-*/{missing}")).unlink()
    before = open_files(os.getpid())
    with pytest.raises(SyncFailed, match="No such file"), pinned_maps(settings):
        pass
    assert not open_files(os.getpid()).items() - before.items()

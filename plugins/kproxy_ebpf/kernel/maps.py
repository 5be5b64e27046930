"""The maps and programs of one network namespace in the kernel."""

import errno
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import reduce
from operator import or_
from pathlib import Path

from kproxy_core.contract import Family, HostError, NodeView, SyncFailed, TrustLost
from kproxy_core.linux.sockets import udp_destruction_problem
from kproxy_core.nft.objects import Table
from kproxy_ebpf import batch, names
from kproxy_ebpf.applied import Contents, Difference
from kproxy_ebpf.batch import client_key, endpoint_key, parse_pin
from kproxy_ebpf.kernel import bpf, mounts
from kproxy_ebpf.kernel.programs import Compiled, ProgramRefused
from kproxy_ebpf.kernel.sockets import destroy_connected_sockets
from kproxy_ebpf.settings import Settings
from kproxy_ebpf.wanted import frontends_left_by_pods, only_node_clients
from kproxy_nft.table import delete_table

log = logging.getLogger("kproxy.ebpf")

MOST_CLIENTS = 1 << 18
"""Upper bound of the map of clients with session affinity: 30 MiB of kernel memory."""
_SO_NETNS_COOKIE = 71


# The pinned maps, for other processes.

_READ = (*names.PER_FAMILY, names.PINS, names.CONNECTIONS)


class PinnedMaps:
    """The maps that a proxy of this network namespace has pinned. Read-only."""

    def __init__(self, maps: Mapping[str, int], *, are_in_use: bool) -> None:
        """*maps* are descriptors by name. Raises OSError."""
        self.are_in_use = are_in_use
        """Programs that choose endpoints are attached."""
        self._maps = maps
        self._definitions = {name: bpf.map_definition(fd) for name, fd in maps.items()}

    def find(self, name: str, key: bytes) -> bytes | None:
        """Return the value of one element; None: it does not exist."""
        return bpf.lookup(self._maps[name], key, self._definitions[name].value)

    def pinned_endpoint(self, service: bytes, affinity_seconds: int) -> bytes | None:
        """Return the endpoint to which a service has pinned the node's own clients; None if to none."""
        value = self.find(names.PINS, client_key(namespace_cookie(), service))
        if value is None:
            return None
        seen, endpoint = parse_pin(value)
        if time.monotonic_ns() - seen >= affinity_seconds * 1_000_000_000:
            return None
        return endpoint if self.find(names.ENDPOINTS, endpoint_key(endpoint, service)) is not None else None

    def contents(self, family: Family) -> Contents:
        return contents_of(family, self._maps, self._definitions)

    def elements(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        return bpf.elements(self._maps[name], self._definitions[name])


@contextmanager
def pinned_maps(settings: Settings) -> Iterator[PinnedMaps | None]:
    """Yield the pinned maps of this network namespace; None without any. Raises SyncFailed."""
    home = pins_of(settings)
    try:
        directory = next(home.glob("maps-*"), None)
        if directory is None:
            yield None
            return
        with ExitStack() as opened:
            maps = {}
            for name in _READ:
                maps[name] = bpf.open_pin(str(directory / name))
                opened.callback(os.close, maps[name])
            are_in_use = (home / "links" / names.ON_THE_WAY_OUT[0]).exists()
            yield PinnedMaps(maps, are_in_use=are_in_use)
    except OSError as error:
        raise SyncFailed(f"cannot read the BPF maps in {home}: {error.strerror}") from error


# The maps and programs.

class Kernel:
    """The mode's maps, programs and links. After `open`, all methods may be called from any thread."""

    def __init__(self, settings: Settings, *, counting: Sequence[str] = ()) -> None:
        """*counting*: programs of `names.COUNTING`; empty: connections are not counted."""
        self._settings = settings
        self._counting = counting
        self._namespace = namespace_cookie()
        self._home = pins_of(settings)
        self._links_directory = self._home / "links"
        self._lock = threading.RLock()
        self._compiled: Compiled
        self._maps_directory: Path
        """Directory of the pins of maps with the layout of `_compiled`."""
        self._has_new_maps = False
        """`open` created the maps: no program has used them before."""
        self._maps: dict[str, int] = {}
        self._programs: dict[str, int] = {}
        self._links: dict[str, int] = {}
        self._settings_written = b""
        self._pods_left = dict(batch.SHORT_CIRCUITS)
        """By family: flags of frontends for which the rules decide about sockets of pods."""
        self._cgroup = -1
        self._cgroup_id = 0
        self._clients_to_count = 0
        """Total of added clients at which `make_room_for_clients` counts the map's clients again."""
        self.attachments = 0
        """Number of successful calls of `attach`: a problem since the last one is new."""
        self._connected_udp = settings.connected_udp
        if problem := udp_destruction_problem() if settings.connected_udp else "":
            log.warning("connected UDP sockets are left to the rules", extra={"fields": {"error": problem}})
            self._connected_udp = False
        released = (names.RELEASE,) if self._connected_udp else ()
        self._wanted = (*counting, *released, *names.PROGRAMS)

    def open(self, compiled: Compiled) -> None:
        """Find or create the maps, and load the programs. Attaches nothing.

        Raises ProgramRefused, SyncFailed.
        """
        with self._lock:
            try:
                self._cgroup = mounts.open_cgroup(self._settings.cgroup)
                self._cgroup_id = mounts.cgroup_id(self._cgroup)
                self._compiled, self._maps_directory = compiled, self._home / f"maps-{compiled.layout}"
                self._has_new_maps = not self._maps_directory.exists()
                self._make_directories()
                for name, definition in compiled.maps.items():
                    self._maps[name] = _open_map(self._maps_directory / name, name, definition)
                self._programs = self._load(self._maps)
                if not is_choosing(self._links_directory):
                    self._forget_frontends()
            except ProgramRefused:
                self.abandon()
                raise
            except (OSError, HostError, SyncFailed) as error:
                self.abandon()
                raise SyncFailed(f"the BPF programs cannot be set up: {error}") from error

    def configure(self, node: NodeView) -> None:
        """Write the settings that programs read at each call. Raises SyncFailed."""
        settings = self._settings
        flags = (
            batch.ONLY_NODE_CLIENTS * only_node_clients(settings.clients, node)
            | batch.KEEP_PEER * settings.getpeername
            | batch.CONNECTED_UDP * self._connected_udp
            | batch.COUNT_CONNECTIONS * bool(self._counting)
        )
        self._pods_left[node.family] = frontends_left_by_pods(settings.clients, node)
        value = batch.settings_value(self._namespace, flags, reduce(or_, self._pods_left.values()))
        if value != self._settings_written:
            with self._lock, _reporting():
                bpf.update(self._maps[names.SETTINGS], bytes(4), value)
            self._settings_written = value

    def contents(self, family: Family) -> Contents:
        """Return all elements of *family*. Raises SyncFailed."""
        self._settings_written = b""
        with self._lock, _reporting():
            return contents_of(family, self._maps, self._compiled.maps)

    def withdraw(self, difference: Difference) -> None:
        """Write the first step of *difference*. Raises TrustLost."""
        with self._lock, _reporting(TrustLost):
            for name, elements in difference.withdrawn.items():
                bpf.delete_all(self._maps[name], list(elements))

    def restore(self, difference: Difference) -> None:
        """Undo the first step of *difference*. Raises TrustLost."""
        with self._lock, _reporting(TrustLost):
            for name in (names.ENDPOINTS, names.SLOTS, names.FRONTENDS):
                self._update(name, difference.withdrawn[name])

    def write(self, difference: Difference) -> None:
        """Write the remaining steps of *difference*. Raises TrustLost."""
        with self._lock, _reporting(TrustLost):
            for name, elements in difference.updates.items():
                self._update(name, elements)
            for name, elements in difference.unused.items():
                bpf.delete_all(self._maps[name], list(elements))

    def replace(self, name: str, before: dict[bytes, bytes], after: dict[bytes, bytes]) -> int:
        """Bring one map from *before* to *after*; return the number of elements written. Raises TrustLost."""
        updates = {key: value for key, value in after.items() if before.get(key) != value}
        deletes = [key for key in before if key not in after]
        with self._lock, _reporting(TrustLost):
            self._update(name, updates)
            bpf.delete_all(self._maps[name], deletes)
        return len(updates) + len(deletes)

    def destroy_connected_sockets(self) -> None:
        """Destroy connected UDP sockets of removed endpoints, if configured.

        Raises SyncFailed.
        """
        if self._connected_udp:
            with self._lock, _reporting():
                destroy_connected_sockets(
                    self._maps[names.CONNECTED], self._compiled.maps[names.CONNECTED],
                    self._maps[names.ENDPOINTS])

    def make_room_for_clients(self) -> None:
        """Replace the map of clients with session affinity by a larger one if half of it is in use.

        The map evicts the least recently seen client, so all clients within the longest timeout count. Raises
        OSError.
        """
        with self._lock:
            if not self._maps:
                return
            added = batch.parse_number(bpf.lookup(self._maps[names.PINNED], bytes(4), 8) or b"")
            if added < self._clients_to_count:
                return
            definition = bpf.map_definition(self._maps[names.PINS])
            self._clients_to_count = added + definition.entries // 8  # Also after a failure.
            clients = bpf.elements(self._maps[names.PINS], definition)
            seen = [batch.parse_pin(value)[0] for _, value in clients]
            since = max(seen, default=0) - self._longest_affinity() * 1_000_000_000
            in_use = sum(moment > since for moment in seen)
            half = definition.entries // 2
            if in_use < half:
                self._clients_to_count = added + half - in_use
            elif definition.entries < MOST_CLIENTS:
                self._double(names.PINS)
            else:
                log.warning("clients with session affinity may be forgotten before their timeout",
                            extra={"fields": {"clients": in_use, "entries": definition.entries}})  # fmt: skip

    def attach(self) -> None:
        """Attach the programs, or replace older ones without a gap. Raises SyncFailed."""
        with self._lock, _reporting():
            self._make_directories()
            if self._program_with_other_maps():
                programs = self._load(self._maps)
                _close_all(self._programs)
                self._programs = programs
            delete_tables()
            for name, descriptor in self._maps.items():
                if not (pin := self._maps_directory / name).exists():
                    bpf.pin(descriptor, str(pin))
            for name in self._wanted:
                self._attach(name)
            # An earlier process may have attached programs for counts or for connected UDP sockets.
            detach_pins(self._links_directory, [name for name in names.KINDS if name not in self._wanted])
            if not self._connected_udp:
                _clear(self._maps[names.CONNECTED])
            self._remove_other_maps()
            self.attachments += 1

    def problem(self) -> str:
        """Return the damage since `attach`; "" if there is none."""
        with self._lock:
            for name, link in self._links.items():
                try:
                    info = bpf.link_info(link)
                except OSError as error:
                    return f"the link of {name} cannot be read: {error}"
                if info.cgroup != self._cgroup_id:
                    return f"the BPF program {name} was detached"
                if info.program != bpf.identity(self._programs[name]):
                    return f"the BPF program {name} was replaced"
                if not (self._links_directory / name).exists():
                    return f"the pin of the BPF program {name} was removed"
            try:
                if name := self._program_with_other_maps():
                    return f"the BPF program {name} reads other maps than are written"
            except OSError as error:
                return f"the BPF programs cannot be read: {error}"
            if self._links:
                for name in self._maps:
                    if not (self._maps_directory / name).exists():
                        return f"the pin of the BPF map {name} was removed"
        return ""

    def abandon(self) -> None:
        """Close all descriptors after a failed setup, and remove new maps, which take 20 MiB."""
        with self._lock:
            self.close()
            if self._has_new_maps:
                shutil.rmtree(self._maps_directory, ignore_errors=True)

    def close(self) -> None:
        """Close all descriptors. Pinned and attached objects remain."""
        with self._lock:
            for opened in (self._maps, self._programs, self._links):
                _close_all(opened)
            if self._cgroup >= 0:
                os.close(self._cgroup)
            self._maps, self._programs, self._links, self._cgroup = {}, {}, {}, -1

    def _forget_frontends(self) -> None:
        """Leave all frontends to the rules, which may be newer than the elements of an earlier process.

        `attach` follows when one family's elements are written. Raises OSError.
        """
        frontends = self._maps[names.FRONTENDS]
        definition = self._compiled.maps[names.FRONTENDS]
        bpf.delete_all(frontends, [key for key, _ in bpf.elements(frontends, definition)])

    def _load(self, maps: dict[str, int]) -> dict[str, int]:
        """Load the programs for *maps*, and return their descriptors. Raises OSError."""
        programs: dict[str, int] = {}
        try:
            for name in self._wanted:
                programs[name] = self._compiled.load(name, maps)
        except OSError:
            _close_all(programs)
            raise
        return programs

    def _program_with_other_maps(self) -> str:
        """Return a program that uses another map than the written ones; "" if none does.

        Raises OSError.
        """
        written = {bpf.identity(descriptor) for descriptor in self._maps.values()}
        return next((name for name, fd in self._programs.items() if bpf.maps_of(fd) - written), "")

    def _longest_affinity(self) -> int:
        """Return the longest timeout of a Service in seconds, 0 without affinity. Raises OSError."""
        frontends = bpf.elements(self._maps[names.FRONTENDS], self._compiled.maps[names.FRONTENDS])
        return max((batch.parse_service(value).affinity_seconds for _, value in frontends), default=0)

    def _update(self, name: str, elements: dict[bytes, bytes]) -> None:
        """Set *elements* of one map, which grows if necessary. Raises OSError."""
        while True:
            try:
                bpf.update_all(self._maps[name], elements)
                return
            except OSError as error:
                if error.errno != errno.E2BIG:
                    raise
            self._double(name)

    def _double(self, name: str) -> None:
        """Replace a full map by a larger one, and the programs without a gap.

        Raises OSError, having replaced nothing.
        """
        full = self._maps[name]
        definition = bpf.map_definition(full)
        larger = definition._replace(entries=2 * definition.entries)
        self._make_directories()  # Another process may have removed them.
        path = self._maps_directory / name
        scratch = path.with_name(f"{name}-new")
        scratch.unlink(missing_ok=True)
        made = _make_map(scratch, name, larger)
        programs: dict[str, int] = {}
        try:
            copied = dict(bpf.elements(full, definition))
            bpf.update_all(made, copied)
            programs = self._load({**self._maps, name: made})
            with self._running(programs):
                if name == names.PINS:  # Meanwhile, programs added clients to the full map.
                    late = bpf.elements(full, definition)
                    bpf.update_all(made, {key: value for key, value in late if copied.get(key) != value})
                scratch.rename(path)
        except OSError:
            os.close(made)
            _close_all(programs)
            scratch.unlink(missing_ok=True)
            raise
        self._maps[name] = made
        os.close(full)
        _close_all(self._programs)
        self._programs = programs
        log.info("BPF map enlarged", extra={"fields": {"map": name, "entries": larger.entries}})

    @contextmanager
    def _running(self, programs: Mapping[str, int]) -> Iterator[None]:
        """Switch the links to *programs*, and back to the present ones if the context fails.

        `attach` repairs a link that another process detached. Raises OSError.
        """
        replaced: list[str] = []
        try:
            for name, link in self._links.items():
                if bpf.link_info(link).cgroup == self._cgroup_id:
                    bpf.update_link(link, programs[name])
                    replaced.append(name)
            yield
        except OSError:
            for name in replaced:
                with suppress(OSError):  # `problem` reports it, and `attach` repairs it.
                    bpf.update_link(self._links[name], self._programs[name])
            raise

    def _attach(self, name: str) -> None:
        pin = self._links_directory / name
        if name not in self._links:
            with suppress(OSError):
                self._links[name] = bpf.open_pin(str(pin))
        program, link = self._programs[name], self._links.get(name)
        if link is not None and bpf.link_info(link).cgroup == self._cgroup_id:
            if bpf.link_info(link).program != bpf.identity(program):
                bpf.update_link(link, program)
        else:
            if link is not None:
                os.close(self._links.pop(name))
            pin.unlink(missing_ok=True)
            link = self._links[name] = bpf.create_link(program, self._cgroup, names.KINDS[name][1])
        if not pin.exists():
            bpf.pin(link, str(pin))

    def _make_directories(self) -> None:
        prepare(self._settings)
        for path in (self._links_directory, self._maps_directory):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _remove_other_maps(self) -> None:
        """Remove the maps of versions with another layout, which no program uses any more."""
        for path in self._home.glob("maps-*"):
            if path != self._maps_directory:
                shutil.rmtree(path, ignore_errors=True)


def contents_of(family: Family, maps: Mapping[str, int], made: Mapping[str, bpf.MapDefinition]) -> Contents:
    """Return all elements of *family*, from *maps* as they were *made*. Raises OSError."""
    return {
        name: {
            key: value for key, value in bpf.elements(maps[name], made[name]) if family_of_key(key) is family
        }
        for name, family_of_key in batch.FAMILY_OF_KEY.items()
    }  # fmt: skip


def namespace_cookie() -> int:
    """Return the kernel's identity of this thread's network namespace (SO_NETNS_COOKIE, Linux 5.14).

    Raises SyncFailed.
    """
    with _reporting(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return int.from_bytes(probe.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8), "little")


def pins_of(settings: Settings) -> Path:
    """Return the directory of this network namespace's pins. Raises SyncFailed."""
    return Path(settings.pin_directory) / str(namespace_cookie())


def prepare(settings: Settings) -> None:
    """Mount a BPF file system for the pins where there is none. Raises SyncFailed."""
    if mounts.is_bpf_file_system(settings.pin_directory):
        return
    parent = Path(settings.pin_directory).parent
    with _reporting():
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mounts.mount_bpf_file_system(str(parent))


def detach_pins(directory: Path, programs: Iterable[str]) -> list[str]:
    """Detach the links that are pinned in *directory*, even if a process holds them. Return removed pins."""
    removed = []
    for name in programs:
        pin = directory / name
        try:
            link = bpf.open_pin(str(pin))
        except FileNotFoundError:
            continue
        except PermissionError:  # No bpf(2) here: without its pin the link ends, unless a process holds it.
            pin.unlink(missing_ok=True)
            removed.append(str(pin))
            continue
        try:
            bpf.detach_link(link)
        finally:
            os.close(link)
        pin.unlink(missing_ok=True)  # A running proxy may have removed the pin of the detached link.
        removed.append(str(pin))
    return removed


def delete_tables(*, dry_run: bool = False) -> list[str]:
    """Delete the tables of kproxy 0.2, and return their names. Raises SyncFailed."""
    try:
        return [
            name for family in Family
            for name in delete_table(Table(family, names.NOTRACK_TABLE), dry_run=dry_run)]
    except HostError as error:
        raise SyncFailed(str(error)) from error


def is_choosing(directory: Path) -> bool:
    """Return whether a link pinned in *directory* runs a program that chooses endpoints. Raises OSError."""
    for name in names.ON_THE_WAY_OUT:
        with suppress(FileNotFoundError):
            link = bpf.open_pin(str(directory / name))
            try:
                if bpf.link_info(link).cgroup:
                    return True
            finally:
                os.close(link)
    return False


def leave_to_rules(settings: Settings) -> None:
    """Detach the programs that choose endpoints, and those that count. Raises SyncFailed, OSError."""
    detach_pins(pins_of(settings) / "links", (*names.ON_THE_WAY_OUT, *names.COUNTING))


def forget_connections(home: Path) -> None:
    """Delete the counts of connections, which have been read: the next process starts at 0."""
    for path in home.glob(f"maps-*/{names.CONNECTIONS}"):
        found = bpf.open_pin(str(path))
        try:
            _clear(found)
        finally:
            os.close(found)


def _clear(fd: int) -> None:
    bpf.delete_all(fd, [key for key, _ in bpf.elements(fd, bpf.map_definition(fd))])


def _open_map(path: Path, name: str, definition: bpf.MapDefinition) -> int:
    """Return the map pinned at *path*, or pin a new one there."""
    with suppress(FileNotFoundError):
        return bpf.open_pin(str(path))
    return _make_map(path, name, definition)


def _make_map(path: Path, name: str, definition: bpf.MapDefinition) -> int:
    made = bpf.create_map(names.OBJECT_PREFIX + name, definition)
    try:
        bpf.pin(made, str(path))
    except OSError:
        os.close(made)
        raise
    return made


def _close_all(opened: Mapping[str, int]) -> None:
    for descriptor in opened.values():
        os.close(descriptor)


@contextmanager
def _reporting(failure: type[SyncFailed] = SyncFailed) -> Iterator[None]:
    """Turn errors of the kernel into *failure*."""
    try:
        yield
    except OSError as error:
        raise failure(f"BPF: {error}") from error

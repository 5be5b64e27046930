"""A whole machine with Debian, whose first process is systemd, in namespaces as a container has them."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kproxy_conformance.network.dialing import wait_until
from kproxy_conformance.network.namespaces import Namespace
from tests.install.debian import Debian, release

START = 60.0
"""Seconds for systemd to start."""
LOOK = 0.2
"""Seconds between two looks, each of which starts two programs."""

_BOOT = """
mount -t tmpfs tmpfs "$2"
cd "$2"
mkdir changes work root cgroups
mount -t cgroup2 cgroup2 cgroups
cgroup=cgroups/kproxy-machine-of-$KPROXY_TEST_RUN-$$
mkdir "$cgroup"
echo $$ > "$cgroup/cgroup.procs"
unshare --cgroup --fork --ipc --kill-child --mount --pid --uts sh -euc '
    mount -t overlay -o "lowerdir=$1,upperdir=changes,workdir=work" overlay root
    cd root
    mount -t proc proc proc
    mount -t sysfs sysfs sys
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    for at in dev run tmp; do mount -t tmpfs -o mode=755 tmpfs $at; done
    for node in null:3 zero:5 full:7 random:8 urandom:9; do mknod -m 666 dev/${node%:*} c 1 ${node#*:}; done
    mknod -m 666 dev/tty c 5 0
    mkdir dev/hugepages dev/mqueue dev/pts dev/shm
    mount -t devpts -o ptmxmode=666 devpts dev/pts
    ln -s pts/ptmx dev/ptmx
    ln -s /proc/self/fd dev/fd
    pivot_root . mnt
    umount -l mnt
    exec env -i container=kproxy-test PATH=/usr/sbin:/usr/bin /lib/systemd/systemd' sh "$1" </dev/null &
unshared=$!
echo $$ > cgroups/cgroup.procs
echo "$unshared"
cat # until the tests are done with it, or have ended
kill -KILL "$unshared"
wait "$unshared" || :
until find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null; do sleep 0.1; done
"""


class Machine(Debian):
    """One release, whose programs and services see its own processes, files and network only."""

    def command(self, *command: str) -> list[str]:
        enter = ["nsenter", f"--target={self._holder}", "--all", "--root", f"--wd=/proc/{self._holder}/root"]
        return [*enter, "env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", *command]

    def is_running(self) -> bool:
        """Return whether systemd has started everything."""
        return self.run("systemctl", "is-system-running").stdout == "running\n"

    def shown(self, unit: str, *properties: str) -> dict[str, str]:
        """Return *properties* of a unit, as systemd sees it now."""
        printed = output(self, "systemctl", "show", f"--property={','.join(properties)}", unit)
        return dict(line.split("=", 1) for line in printed.splitlines())

    def await_shown(self, unit: str, seconds: float = START, **expected: str) -> None:
        """Wait until properties of *unit* are *expected*."""
        def is_expected() -> bool:
            return self.shown(unit, *expected) == expected

        assert wait_until(is_expected, seconds, LOOK), (
            self.shown(unit, *expected), self.run("journalctl", f"--unit={unit}", "--no-pager").stdout)


def output(node: Debian, *command: str, stdin: str = "") -> str:
    """Run a command on *node*, which must succeed, and return its output."""
    done = node.run(*command, stdin=stdin)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def apt_get(node: Debian, *arguments: str) -> None:
    """Run ``apt-get`` on *node*, which asks nothing."""
    output(node, "apt-get", "-y", "--no-install-recommends", *arguments)


@contextmanager
def machine(suite: str, directory: Path, network: Namespace) -> Iterator[Machine]:
    """Yield a machine with the release *suite* and the network *network*, once systemd has started.

    Its changes are kept in memory, mounted at *directory* for its processes only.
    """
    command = ["nsenter", f"--net={network.path}", "unshare", "--mount", "--propagation=private",
               "sh", "-euc", _BOOT, "sh", release(suite), str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            unshared = holder.stdout.readline().strip()
            children = Path(f"/proc/{unshared}/task/{unshared}/children")
            assert wait_until(lambda: children.read_text().strip(), START), "there is no first process"
            made = Machine(int(children.read_text()))
            assert wait_until(made.is_running, START, LOOK), made.run("systemctl", "--failed")
            yield made
        finally:
            holder.stdin.close()  # which ends it

"""Run a command as Docker does by default: ``python -m tests.environments.container COMMAND...``, as root.

The capabilities are Docker's default ones, neither CAP_NET_ADMIN nor CAP_SYS_ADMIN among them; its seccomp
profile refuses new namespaces, mounts and bpf(2) to such a process; ``/proc/sys`` and ``/sys`` are read-only.
The command gets namespaces of its own, with loopback and an address, but the files of this machine.
"""

import ctypes
import errno
import os
import subprocess
import sys

CAPABILITIES = (
    "chown", "dac_override", "fsetid", "fowner", "mknod", "net_raw", "setgid", "setuid", "setfcap", "setpcap",
    "net_bind_service", "sys_chroot", "kill", "audit_write",
)  # fmt: skip
"""Docker's defaults (docs.docker.com, "Runtime privilege and Linux capabilities")."""

_REFUSED = (
    "acct", "add_key", "bpf", "clock_adjtime", "clock_settime", "delete_module", "fanotify_init",
    "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "init_module", "kexec_load", "keyctl",
    "lookup_dcookie", "mount", "mount_setattr", "move_mount", "open_by_handle_at", "open_tree",
    "perf_event_open", "pivot_root", "quotactl",
    "reboot", "request_key", "setdomainname", "sethostname", "setns", "settimeofday", "swapoff", "swapon",
    "syslog", "umount2", "unshare", "userfaultfd", "vhangup",
)  # fmt: skip
"""System calls that Docker's default seccomp profile refuses to a process with `CAPABILITIES`."""

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # seccomp.h of libseccomp
_MASKED_EQUAL = 7  # SCMP_CMP_MASKED_EQ
_NEW_NAMESPACES = 0x7E020000
"""The flags CLONE_NEW* of clone(2)."""


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64),
    )  # fmt: skip


def confine() -> None:
    """Refuse what the profile refuses, to this process and its children. Raises OSError."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    refused = dict.fromkeys(_REFUSED, errno.EPERM) | {"clone3": errno.ENOSYS}
    for name, error in refused.items():
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            action = ctypes.c_uint32(_ERRNO | error)
            _check(library.seccomp_rule_add_array(context, action, number, 0, None))
    clone = library.seccomp_syscall_resolve_name(b"clone")
    for bit in (1 << shift for shift in range(32) if _NEW_NAMESPACES >> shift & 1):
        wanted = _Comparison(0, _MASKED_EQUAL, bit, bit)
        _check(library.seccomp_rule_add_array(
            context, ctypes.c_uint32(_ERRNO | errno.EPERM), clone, 1, ctypes.byref(wanted)))  # fmt: skip
    _check(library.seccomp_load(context))


def _check(result: int) -> None:
    if result:
        raise OSError(-result, os.strerror(-result))


_PREPARE = """
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add eth0 type veth peer name host
ip link set eth0 up
ip link set host up
ip address add 172.17.0.2/16 dev eth0
ip route add default via 172.17.0.1
mount -t sysfs -o ro sysfs /sys
mount --bind /proc/sys /proc/sys
mount -o remount,ro,bind /proc/sys
exec "$@"
"""


def command(argv: list[str]) -> list[str]:
    """Return the command that runs *argv* in such a container."""
    bounding = ",".join(["-all", *(f"+{name}" for name in CAPABILITIES)])
    return [
        "unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc",
        "sh", "-euc", _PREPARE, "container",
        "setpriv", f"--bounding-set={bounding}", "--inh-caps=-all",
        sys.executable, __file__, "--inside", *argv,
    ]  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        confine()
        os.execvp(sys.argv[2], sys.argv[2:])
    sys.exit(subprocess.run(command(sys.argv[1:]), check=False).returncode)

"""``kproxy unit``: a unit file, with which systemd runs kproxy as a service of the machine."""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from kproxy_core.cli.options import FlagCommand

CONFIG = "/etc/kproxy/config.yaml"

_HOMES = ("/home", "/root", "/run/user")
"""The directories that ProtectHome= hides."""

_TEMPLATE = """\
# Printed by `kproxy unit`. Change it with `systemctl edit kproxy`, so that a newer one can replace this file.

[Unit]
Description=kproxy, a Kubernetes service proxy
# Both flush rules when they start. If they start later, kproxy repairs its own, so there is no PartOf=.
After=network-pre.target nftables.service firewalld.service
# Restart however often it has failed.
StartLimitIntervalSec=0

[Service]
# Started once every IP family is in sync. Until then kproxy may wait for the API server, or stand by while
# another process serves. Neither is a failure.
Type=notify
TimeoutStartSec=infinity
# Writes the sysctls and loads the modules that the configured modes need, with all privileges.
ExecStartPre=+{kproxy} --config={config} --init-only
# Programs that write iptables rules share this lock. It must exist before ReadWritePaths= can name it.
ExecStartPre=+/usr/bin/touch /run/xtables.lock
ExecStart={kproxy} --config={config}
# No ExecReload=: kproxy follows the file, and exits with status 1 if a change needs a restart.
# No ExecStopPost=: the rules serve without the process. `kproxy --cleanup` removes them.
Restart=on-failure
RestartSec=1
# Fed while /livez answers 200 and the loop is not stuck. On SIGTERM a stuck process logs where it is stuck.
WatchdogSec=2min
WatchdogSignal=SIGTERM
TimeoutStopSec=10
OOMScoreAdjust=-999
# The journal of mode switches, counts of connections, cached BPF programs, the lock of the serving process.
RuntimeDirectory=kproxy
RuntimeDirectoryPreserve=yes

# For rules and conntrack. A drop-in adds CAP_NET_RAW for legacy iptables, or CAP_BPF for the ebpf mode.
CapabilityBoundingSet=CAP_NET_ADMIN
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths=-/run/xtables.lock
ProtectHome={home}
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelTunables=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
# No ProtectKernelModules=: it hides /lib/modules, in which the ipvs mode looks up modules.
SystemCallArchitectures=native
SystemCallErrorNumber=EPERM
SystemCallFilter=@system-service
SystemCallFilter=~@aio @keyring @memlock @setuid
SystemCallFilter=~kcmp name_to_handle_at personality process_madvise process_vm_readv process_vm_writev
SystemCallFilter=~setns unshare userfaultfd

[Install]
WantedBy=multi-user.target
"""


def unit(executable: str, config: str, others: Iterable[str] = ()) -> str:
    """Return a unit that runs *executable* with the configuration file *config*.

    *others*: more files that the process needs. If one of them is in a home directory, these can be read.
    """
    needed = (executable, config, *others)
    at_home = any(Path(path).is_relative_to(home) for path in needed for home in _HOMES)
    return _TEMPLATE.format(
        kproxy=_quoted(executable), config=_quoted(config).replace("$", "$$"),
        home="read-only" if at_home else "yes")


def _quoted(path: str) -> str:
    """Return *path* as a program or, once $ is doubled, as an argument: systemd.service(5), COMMAND LINES."""
    return re.sub(r"""[\\"'\s;]""", lambda found: f"\\x{ord(found[0]):02x}", path).replace("%", "%%")


@click.command("unit", cls=FlagCommand)
@click.option("--config", metavar="FILE", default=CONFIG, show_default=True,
              help="The configuration file that the service reads.")
def command(config: str) -> None:
    """Print a systemd unit that runs kproxy as a service of this machine.

    It runs the executable that prints it, with the privileges that are needed and no others: `kproxy unit
    >/etc/systemd/system/kproxy.service`.
    """
    own = os.path.abspath(sys.argv[0])
    click.echo(unit(own, os.path.abspath(config), [os.path.realpath(sys.executable), sys.prefix]), nl=False)

"""``kubectl kproxy``: one module per command, imported only when it is used."""

import click

from kproxy_core import __version__
from kproxy_core.cli.commands import run_script
from kproxy_core.cli.options import NORMAL, FlagGroup

COMMANDS = {
    "status": "Say which nodes' proxies are well.",
    "explain": "Explain what happens to packets from FROM to TO, and why, in the whole cluster.",
    "diff": "Compare what each node's kernel does with packets to what it should do.",
    "verify": "Connect from every node to every Service by TCP.",
    "top": "Show the traffic of each Service, summed over the nodes.",
    "report": "Collect the archives for a bug report.",
    "version": "Print the version.",
    "switch": "Switch the proxies of many nodes to another mode; connections stay open.",
}
"""The first sentence of each command's help."""


@click.group("kubectl kproxy", cls=FlagGroup, summaries=COMMANDS, package=__package__,
             context_settings=NORMAL)
@click.version_option(__version__, message="kproxy %(version)s")
def kubectl_kproxy() -> None:
    """Ask the kproxy of every node of a cluster.

    Commands run in the DaemonSet's pods, as with `kubectl exec`. Nothing else runs in the cluster.
    """


def main() -> None:
    """Run the console script, which kubectl calls as its plugin."""
    run_script(kubectl_kproxy)

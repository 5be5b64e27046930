"""The command line: one module per command, with its options, its work and its output.

The only room that may import all others. Nothing heavy is imported before the command that needs it is known,
so that ``--version`` and ``--help`` are fast.
"""

from kproxy_core.cli.commands import kproxy as kproxy
from kproxy_core.cli.commands import main as main

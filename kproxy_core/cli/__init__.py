"""The command line: options in, one room of the program called, text out. The only room that may import all.

Nothing heavy is imported before the command that needs it is known, so that ``--version`` and ``--help``
answer at once.
"""

from kproxy_core.cli.commands import kproxy as kproxy
from kproxy_core.cli.commands import main as main

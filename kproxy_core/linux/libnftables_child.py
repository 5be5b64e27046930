"""The child process of `libnftables`, which runs commands of nft one by one.

    libnftables_child.py [SETTING]... -- [COMMAND]...

A SETTING is a method of the binding without ``set_``, such as ``handle_output``. Without a COMMAND, standard
input is one. Each answer is a line of JSON with exit status, output and error output, printed before the next
command runs.

A Python that does not see this package may run it: it imports only the standard library and the binding.
"""

import json
import os
import sys

NO_BINDING = 3
"""Exit status if the binding or the library is missing."""


def main(arguments: list[str]) -> int:
    end = arguments.index("--")
    settings, commands = arguments[:end], arguments[end + 1:]
    try:
        from nftables import Nftables

        nft = Nftables()
    except (ImportError, OSError) as error:
        print(error, file=sys.stderr)
        return NO_BINDING
    for setting in settings:
        getattr(nft, f"set_{setting}")(True)
    for command in [os.fsencode(command) for command in commands] or [sys.stdin.buffer.read()]:
        status, *texts = nft.cmd(command)
        print(json.dumps([status, *(text.decode(errors="replace") for text in texts)]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

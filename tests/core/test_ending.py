"""The end of a process whose work does not end."""

import signal
import subprocess
import sys

STUCK = """
import logging, threading
from kproxy_core.process import ending
ending.PROGRAMS_END = ending.PROCESS_ENDS = 0.1
logging.basicConfig(format="%(message)s %(fields)s")
ending.stop_on_signals(lambda: None)
print("ready", flush=True)
def never_ends(): threading.Event().wait()
never_ends()
"""


def test_the_process_ends_with_the_stack_of_every_thread() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "exiting before everything has ended" in log
    assert "never_ends" in log

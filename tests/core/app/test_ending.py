"""The end of a process whose work does not end."""

import signal
import subprocess
import sys

STUCK = """
import threading
from kproxy_core.observe import logs
from kproxy_core.app import assembly
assembly.PROGRAMS_END = assembly.PROCESS_ENDS = 0.1
logs.set_up(0, "text")
assembly.stop_on_signals(lambda: None)
arrived = threading.Semaphore(0)
def never_ends():
    arrived.release()
    if threading.current_thread() is threading.main_thread(): print("ready", flush=True)
    threading.Event().wait()
def descend(depth): descend(depth - 1) if depth else never_ends()
for _ in range(12): threading.Thread(target=descend, args=[50], daemon=True).start()
for _ in range(12): arrived.acquire()
descend(50)
"""


def test_the_process_ends_with_the_last_calls_of_every_thread() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "exiting before everything has ended" in log
    assert log.count("never_ends") == 13

"""CPU time as a measure of the cost of a piece of work."""

import resource
import time


def cpu_seconds() -> float:
    """Return the CPU time of the calling thread and of all child processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime

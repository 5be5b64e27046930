"""What syncs cost: ``tests/guest/run .venv/bin/python -m tests.plugins.ipvs.bench [SERVICES] [--profile]``.

The guest's system calls are several times as dear as a machine's, so what counts is how figures grow.
"""

import cProfile
import pstats
import subprocess
import sys
import time
from collections.abc import Callable

from kproxy_core.backend.api import BackendSettings
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_core.testing.builders import (
    changed_update,
    endpoint_slice,
    full_update,
    node_view,
    plans,
    service,
)
from kproxy_ipvs.backend import IpvsBackend
from kproxy_ipvs.cleanup import cleanup

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1", ip="192.0.2.1")
ENDPOINTS = 5
CHANGES = 20


def planned(number: int, endpoints: int = ENDPOINTS) -> dict[ServicePortKey, ServicePlan]:
    """The Service *number*."""
    svc = service(f"web-{number}", ip=f"10.{96 + number // 65536}.{number // 256 % 256}.{number % 256}")
    pods = [f"10.{128 + number % 64}.{number // 64}.{pod + 1}" for pod in range(endpoints)]
    return plans(NODE, svc, endpoint_slice(str(svc.name), *pods, family=Family.IPV4))


def measure(what: str, action: Callable[[], object], times: int = 1) -> None:
    began, used = time.monotonic(), time.process_time()
    for _ in range(times):
        action()
    seconds, own = time.monotonic() - began, time.process_time() - used
    print(f"  {what:32}{seconds / times:9.4f} s, {own / times:9.4f} s of this process", flush=True)


def bench(services: int, profile: bool) -> None:
    print(f"{services} services x {ENDPOINTS}")
    wanted: dict[ServicePortKey, ServicePlan] = {}
    for number in range(services):
        wanted |= planned(number)
    full = full_update(NODE, wanted)
    backend = IpvsBackend(BackendSettings((Family.IPV4,)))
    measure("first sync", lambda: backend.kproxy_sync(full))
    again = IpvsBackend(BackendSettings((Family.IPV4,)))
    measure("restart with nothing to do", lambda: again.kproxy_sync(full))
    turn = iter(range(10_000))

    def change() -> None:
        one = planned(services // 2, ENDPOINTS - next(turn) % 2)
        again.kproxy_sync(changed_update(NODE, wanted | one, one))

    change()
    measure("one endpoint", change, CHANGES)
    one = planned(services + 1)
    measure("one more service", lambda: again.kproxy_sync(changed_update(NODE, wanted | one, one)))
    if profile:
        profiler = cProfile.Profile()
        profiler.runcall(again.kproxy_sync, full)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(12)
    backend.kproxy_close()
    again.kproxy_close()
    measure("clean-up", lambda: cleanup(dry_run=False))


def main() -> None:
    subprocess.run(["modprobe", "ip_vs"], check=True)
    arguments = sys.argv[1:]
    for size in [int(argument) for argument in arguments if argument.isdigit()] or [100, 1000, 5000]:
        bench(size, profile="--profile" in arguments)


if __name__ == "__main__":
    main()

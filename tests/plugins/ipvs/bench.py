"""Cost of syncs: ``tests/guest/run .venv/bin/python -m tests.plugins.ipvs.bench [SERVICES...]``.

The guest's system calls are several times as dear as a machine's, so what counts is how figures grow. A
profiler would measure the calls with which it reads the clock; so the parts of a full sync are timed.
"""

import gc
import subprocess
import sys
import time
from collections.abc import Callable

from kproxy_conformance.builders import changed_update, endpoint_slice, full_update, node_view, plans, service
from kproxy_core.app import preparation
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ipvs.applied import Applied
from kproxy_ipvs.backend import IpvsBackend
from kproxy_ipvs.cleanup import cleanup
from kproxy_ipvs.kernel import device, sets
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.wanted import Style
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_variant

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1", ip="192.0.2.1")
ENDPOINTS = 5
CHANGES = 20
REPEATED = 3


def planned(number: int, endpoints: int = ENDPOINTS) -> dict[ServicePortKey, ServicePlan]:
    """Return the plans of Service *number*."""
    svc = service(f"web-{number}", ip=f"10.{96 + number // 65536}.{number // 256 % 256}.{number % 256}")
    pods = [f"10.{128 + number % 64}.{number // 64}.{pod + 1}" for pod in range(endpoints)]
    return plans(NODE, svc, endpoint_slice(str(svc.name), *pods, family=Family.IPV4))


def measure(what: str, action: Callable[[], object], times: int = 1) -> None:
    """Print the duration of the fastest of *times* runs."""
    taken = []
    for _ in range(times):
        began, used = time.monotonic(), time.process_time()
        action()
        taken.append((time.monotonic() - began, time.process_time() - used))
    seconds, own = min(taken)
    print(f"  {what:38}{seconds:9.4f} s, {own:6.2f} s of this process", flush=True)


def bench(services: int) -> None:
    print(f"{services} services x {ENDPOINTS}")
    wanted: dict[ServicePortKey, ServicePlan] = {}
    for number in range(services):
        wanted |= planned(number)
    full = full_update(NODE, wanted)
    gc.disable()
    preparation.tune_interpreter()
    backend = IpvsBackend(BackendSettings((Family.IPV4,)))
    measure("first sync", lambda: backend.sync(full))
    again = IpvsBackend(BackendSettings((Family.IPV4,)))
    preparation.settle_memory()
    measure("restart with nothing to do", lambda: again.sync(full), REPEATED)
    turn = iter(range(10_000))

    def change() -> None:
        one = planned(services // 2, ENDPOINTS - next(turn) % 2)
        again.sync(changed_update(NODE, wanted | one, one))

    change()
    measure("one endpoint", change, CHANGES)
    one = planned(services + 1)
    measure("one more service", lambda: again.sync(changed_update(NODE, wanted | one, one)))
    parts(wanted)
    backend.close()
    again.close()
    measure("clean-up", lambda: cleanup(dry_run=False))


def parts(wanted: dict[ServicePortKey, ServicePlan]) -> None:
    """Print the durations of the parts of a full sync with nothing to write."""
    style = Style(
        family=Family.IPV4, scheduler="rr", node_ip=NODE.node_ip,
        node_port_addresses=NODE.node_port_addresses, masquerade_bit=NODE.masquerade_bit,
    )  # fmt: skip
    tables = Tables(Family.IPV4, find_variant())
    servers = VirtualServers()
    keys = list(servers.read(Family.IPV4))
    for what, action in (
        ("  of it: plans to what they want", lambda: Applied.after(wanted, style)),
        ("  of it: reading sets", lambda: sets.read(Family.IPV4)),
        ("  of it: reading addresses", lambda: device.read(Family.IPV4)),
        ("  of it: reading rules", lambda: tables.chains()),
        ("  of it: reading virtual servers", lambda: servers.read(Family.IPV4)),
        ("  (one dump for each server instead)", lambda: list(map(servers.destinations, keys))),
    ):
        measure(what, action, REPEATED)
    servers.close()


def main() -> None:
    subprocess.run(["modprobe", "ip_vs"], check=True)
    for size in map(int, sys.argv[1:] or (100, 1000, 5000)):
        bench(size)


if __name__ == "__main__":
    main()

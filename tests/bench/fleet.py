"""How long ``kubectl kproxy status`` takes for many nodes: ``python -m tests.bench.fleet --nodes 300``.

Every node's command is a process of its own behind the kit's API server. It answers after --delay seconds
what a kproxy that is well answers: a real kproxy's CPU time is spent on its node, not here.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kproxy_conformance.processes import own_name
from tests.fleet.canned import STATUS, Canned
from tests.fleet.fleet import KUBECTL_KPROXY


def main() -> None:
    parser = argparse.ArgumentParser(description="kubectl kproxy status for many nodes")
    parser.add_argument("--nodes", type=int, default=300)
    parser.add_argument("--delay", type=float, default=1.0, help="seconds that each command takes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=f"{own_name('bench')}-") as directory:
        canned = Canned(Path(directory))
        answer = Path(directory, "answer")
        answer.write_text(json.dumps(STATUS))
        for number in range(options.nodes):
            canned.node(f"node-{number:04}", f"sleep {options.delay}; exec cat {answer}")
        began = time.monotonic()
        done = subprocess.run(
            [KUBECTL_KPROXY, "status", "--kubeconfig", canned.kubeconfig], capture_output=True, text=True,
            check=False)
        took = time.monotonic() - began
        canned.server.stop()
    if done.returncode:
        sys.exit(done.stderr or done.stdout)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{options.nodes} nodes, {options.delay:g} s each: {took:.1f} s; {done.stdout.splitlines()[-1]}; "
          f"peak {usage.ru_maxrss >> 10} MiB")


if __name__ == "__main__":
    main()

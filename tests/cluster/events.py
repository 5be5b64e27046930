"""What an operator does to a running cluster, under load: each event with the requests that failed."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.cluster import deployment
from tests.cluster.cluster import Cluster
from tests.cluster.load import Target, under_load

_FLEET = Path(sys.executable).with_name("kubectl-kproxy")


def play(cluster: Cluster, targets: Sequence[Target], mode: str, other: str) -> Iterator[str]:
    """Yield a line of Markdown for each event in *mode*; *other*: one to switch to and back."""
    switch = f"kubectl kproxy switch {other}"
    events: list[tuple[str, Callable[[], object]]] = [
        ("rollout restart", lambda: deployment.restart(cluster)),
        (switch, lambda: _fleet(cluster, "switch", other, "--accept-losses", "--yes")),
        (f"{switch} --undo", lambda: _fleet(cluster, "switch", other, "--undo", "--yes")),
        ("kubectl kproxy verify", lambda: _fleet(cluster, "verify", "--traffic")),
    ]
    for name, event in events:
        with under_load(targets) as load:
            event()
        yield f"| {mode} | {name} | {load.requests} | {len(load.failed)} |"
        yield from (f"  - {failure}" for failure in load.failed[:5])


def _fleet(cluster: Cluster, *arguments: str) -> str:
    return cluster.home.run(
        "env", f"KUBECONFIG={cluster.kubeconfig}", str(_FLEET), *arguments, timeout=900)

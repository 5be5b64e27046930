"""What an operator does to a running cluster, under load: each event with the requests that failed."""

from collections.abc import Callable, Iterator, Sequence

from tests.cluster import deployment
from tests.cluster.cluster import Cluster
from tests.cluster.load import Target, under_load


def play(cluster: Cluster, targets: Sequence[Target], mode: str, other: str) -> Iterator[str]:
    """Yield a line of Markdown for each event in *mode*; *other*: one to switch to and back."""
    switch = f"kubectl kproxy switch {other}"
    events: list[tuple[str, Callable[[], object]]] = [
        ("rollout restart", lambda: deployment.restart(cluster)),
        (switch, lambda: deployment.fleet(cluster, "switch", other, "--accept-losses", "--yes")),
        (f"{switch} --undo", lambda: deployment.fleet(cluster, "switch", other, "--undo", "--yes")),
        ("kubectl kproxy verify", lambda: deployment.fleet(cluster, "verify", "--traffic")),
    ]
    for name, event in events:
        with under_load(targets) as load:
            event()
        yield f"| {mode} | {name} | {load.requests} | {len(load.failed)} |"
        yield from (f"  - {failure}" for failure in load.failed[:5])


"""Counting of connections in the running proxy."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kproxy_core.backend.instance import BackendInstance
from kproxy_core.config.settings import Config
from kproxy_core.model.address import Family
from kproxy_core.observe.metrics.registry import Metrics

if TYPE_CHECKING:
    from kproxy_core.traffic.recorder import TrafficRecorder


def make_recorder(
    config: Config, families: Sequence[Family], instance: BackendInstance, metrics: Metrics
) -> "TrafficRecorder | None":
    """Return the recorder of connections, whose totals are in *metrics*; None if none are counted."""
    if not config.kproxy.count_traffic:
        return None
    from kproxy_core.observe.metrics.traffic import TrafficCollector
    from kproxy_core.traffic.owners import FrontendOwners
    from kproxy_core.traffic.recorder import TrafficRecorder
    from kproxy_core.traffic.stored import StoredTotals

    # A scrape of 10,000 Services computes for 0.4 s. A sync that needs the interpreter waits this long.
    sys.setswitchinterval(0.0001)
    owners = FrontendOwners(families, time.monotonic)
    recorder = TrafficRecorder(
        families, instance, owners, StoredTotals(config.kproxy.state_directory), time.monotonic)
    metrics.registry.register(TrafficCollector(
        recorder, endpoints=config.kproxy.traffic_metrics == "endpoint", limit=config.kproxy.max_series))
    return recorder

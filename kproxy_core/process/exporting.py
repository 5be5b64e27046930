"""The export of the running proxy's metrics."""

import logging
import os
from typing import TYPE_CHECKING

from kproxy_core import __version__
from kproxy_core.observe.metrics.registry import Metrics

if TYPE_CHECKING:
    from kproxy_core.observe.metrics.otlp import OtlpExporter

log = logging.getLogger("kproxy.run")


def make_exporter(metrics: Metrics, node: str) -> "OtlpExporter | None":
    """Return the exporter that OpenTelemetry's variables of the environment ask for, if they do."""
    if not any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        return None
    from kproxy_core.observe.metrics.otlp import OtlpExporter, read_target

    resource = {"service.name": "kproxy", "service.version": __version__, "k8s.node.name": node}
    try:
        target = read_target(os.environ, resource)
    except ValueError as error:
        log.error("metrics are not pushed by OTLP", extra={"fields": {"because": str(error)}})
        return None
    return OtlpExporter(metrics.registry, target, __version__) if target is not None else None

"""The export of the running proxy's metrics."""

import logging
import os
from typing import TYPE_CHECKING

from kproxy_core import __version__
from kproxy_core.observe.metrics.registry import Metrics

if TYPE_CHECKING:
    from kproxy_core.observe.metrics.otlp import OtlpExporter

log = logging.getLogger("kproxy.run")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def make_exporter(metrics: Metrics, node: str) -> "OtlpExporter | None":
    """Return the exporter that OpenTelemetry's variables of the environment ask for, if they do."""
    variable = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if variable is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    attributes = {"service.name": "kproxy", "service.version": __version__, "k8s.node.name": node}
    problem = f"{variable} is set, but OpenTelemetry's exporter is not installed: pip install 'kproxy[otlp]'"
    try:
        from kproxy_core.observe.metrics.otlp import OtlpExporter

        return OtlpExporter(metrics.registry, attributes, __version__)
    except ImportError as error:
        if not (error.name or "").startswith("opentelemetry"):
            problem = f"{variable} is set, but {error}"
    except ValueError as error:
        problem = str(error)
    log.error("metrics are not pushed by OTLP", extra={"fields": {"because": problem}})
    return None

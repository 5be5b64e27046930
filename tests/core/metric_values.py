"""Metrics as a test reads them."""

from kproxy_core.observe.metrics import Metrics


def values(metrics: Metrics) -> dict[str, float]:
    """Return all samples but buckets, by name and sorted labels as the text format spells them."""
    return {
        sample.name + (f"{{{','.join(labels)}}}" if labels else ""): sample.value
        for metric in metrics.registry.collect() for sample in metric.samples
        if not sample.name.endswith("_bucket")
        for labels in [[f'{name}="{value}"' for name, value in sorted(sample.labels.items())]]
    }

"""How often the metrics server's own checks were made: ``/metrics/slis`` (component-base 1.36)."""

import threading

from kproxy_core.observe.instruments import Sample, exposition

_ABOUT = {
    "kubernetes_healthcheck": ("gauge", "Result of the last check"),
    "kubernetes_healthchecks_total": ("counter", "Checks by result"),
    "process_start_time_seconds": ("gauge", "When this process began, in seconds since the epoch"),
}


class HealthcheckSlis:
    """The only check there is, ``ping``, and it succeeds whenever it is made. Any thread may call."""

    def __init__(self, started: float) -> None:
        """*started*: when the process began, in seconds since the epoch."""
        self._started = started
        self._lock = threading.Lock()
        self._checks = 0

    def checked(self) -> None:
        """The check was made."""
        with self._lock:
            self._checks += 1

    def reset(self) -> None:
        """Forget all checks."""
        with self._lock:
            self._checks = 0

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format 0.0.4."""
        with self._lock:
            checks = self._checks
        ping = {"name": "ping", "type": "healthz"}
        samples: dict[str, list[Sample]] = {"process_start_time_seconds": [("", {}, self._started)]}
        if checks:
            samples["kubernetes_healthcheck"] = [("", ping, 1)]
            samples["kubernetes_healthchecks_total"] = [("", {**ping, "status": "success"}, checks)]
        return exposition((name, about, kind, samples[name])
                          for name, (kind, about) in _ABOUT.items() if name in samples)

"""How often the metrics server's own checks were made: ``/metrics/slis`` (component-base 1.36)."""

import threading

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
        samples: dict[str, list[str]] = {"process_start_time_seconds": [f" {self._started!r}"]}
        if checks:
            samples["kubernetes_healthcheck"] = ['{name="ping",type="healthz"} 1']
            samples["kubernetes_healthchecks_total"] = [
                f'{{name="ping",status="success",type="healthz"}} {checks}']
        lines = []
        for name in sorted(samples):
            kind, about = _ABOUT[name]
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            lines += [name + sample for sample in samples[name]]
        return "".join(f"{line}\n" for line in lines).encode()

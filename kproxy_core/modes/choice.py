"""The choice of the mode to serve in: the requested one, its fallback, or the best that works.

Older kube-proxy fell back from ipvs to iptables and from there to userspace when the kernel or a program
was missing (1.23, cmd/kube-proxy/app/server_others.go).
"""

import logging
from collections.abc import Iterator
from typing import NamedTuple

from kproxy_core.config.settings import Config
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import Unsupported
from kproxy_core.contract.registry import PluginRefused, Registry
from kproxy_core.contract.values import Fallback
from kproxy_core.linux import process
from kproxy_core.model.address import Family, family_of
from kproxy_core.modes.settings import Configuration, serving_settings
from kproxy_core.modes.switch import start_backend

log = logging.getLogger("kproxy.run")


class ChosenMode(NamedTuple):
    config: Config
    """The effective configuration of the chosen mode."""
    instance: BackendInstance
    fallback: Fallback | None
    families: tuple[Family, ...]
    """The served families: all, unless the mode lacks something for the secondary one."""


def choose(
    configuration: Configuration, registry: Registry, wanted: str, families: tuple[Family, ...]
) -> ChosenMode:
    """Start the first working mode of *wanted* and its fallbacks; without *wanted*, of all modes.

    A process without CAP_NET_ADMIN cannot find out what the kernel lacks, and does not fall back.
    Raises ConfigError or InvalidOption for the first mode that is not configured correctly, UnknownMode or
    PluginRefused, or Unsupported if no such mode works.
    """
    privileged = "CAP_NET_ADMIN" in process.network_privileges()
    fall_back = privileged and configuration.of(wanted).kproxy.mode_fallback == "auto"
    problems: dict[str, str] = {}
    for mode in candidates(registry, wanted, fall_back=fall_back):
        try:
            instance = _start(
                registry, mode, configuration.of(mode), families, insist=mode == wanted and not privileged)
        except (Unsupported, PluginRefused) as error:
            if mode == wanted and isinstance(error, PluginRefused):
                raise
            problems[mode] = str(error)
            log.info("mode does not work here", extra={"fields": {"mode": mode, "because": str(error)}})
            continue
        fallback = Fallback(wanted, mode, problems[wanted]) if wanted in problems else None
        if fallback:
            log.warning("falling back to another mode", extra={"fields": fallback._asdict()})
        return ChosenMode(configuration.of(mode), instance, fallback, instance.settings.families)
    if wanted:
        raise Unsupported(_nothing_works(registry, wanted, problems))
    # A line about every installed mode has been logged: one with all of them is too long to read.
    why = "the lines above say why, and so does kproxy modes --probe"
    raise Unsupported(f"{_nothing_works(registry, wanted, {})}; {why}")


def _start(
    registry: Registry, mode: str, config: Config, families: tuple[Family, ...], *, insist: bool
) -> BackendInstance:
    """Start the backend of *mode* for those of *families* that it can serve.

    kube-proxy also serves one family where iptables has no nat table for the other (1.36,
    cmd/kube-proxy/app/server_linux.go). Raises UnknownMode, PluginRefused, InvalidOption or Unsupported.
    """
    try:
        return start_backend(registry, mode, serving_settings(config, registry, families), insist=insist)
    except Unsupported as error:
        served = tuple(family for family in families if family is not error.family)
        if served == families or primary(config) not in served:
            raise
        log.warning("IP family is not served", extra={"fields": {
            "mode": mode, "ip_family": error.family.label if error.family else "", "because": str(error)}})
        return start_backend(registry, mode, serving_settings(config, registry, served))


def primary(config: Config) -> Family:
    """Return the primary family, which a mode must be able to serve."""
    return family_of(config.bind_address) if any(config.bind_address) else Family.IPV4


class Conclusion(NamedTuple):
    mode: str
    fallback: Fallback | None


def conclude(
    configuration: Configuration, registry: Registry, families: tuple[Family, ...], wanted: str = ""
) -> Conclusion:
    """Return the mode that `choose` would take, concluded without starting any.

    Raises ConfigError or InvalidOption, UnknownMode or PluginRefused, or Unsupported if no mode is usable.
    """
    if wanted and "CAP_NET_ADMIN" not in process.network_privileges():
        return Conclusion(wanted, None)
    fall_back = configuration.of(wanted).kproxy.mode_fallback == "auto"
    problems: dict[str, str] = {}
    for mode in candidates(registry, wanted, fall_back=fall_back):
        try:
            detection = registry.detect(mode, serving_settings(configuration.of(mode), registry, families))
        except Unsupported as error:
            problems[mode] = str(error)
            continue
        if not detection.refuted if wanted else detection.usable:
            return Conclusion(mode, Fallback(wanted, mode, problems[wanted]) if problems and wanted else None)
        problems[mode] = detection.because
    raise Unsupported(_nothing_works(registry, wanted, problems))


def candidates(registry: Registry, wanted: str, *, fall_back: bool) -> Iterator[str]:
    """Yield *wanted* and, with *fall_back*, the installed modes that each names as its fallbacks.

    Those of a mode are tried before those that they name themselves. Without a *wanted* mode, yield every
    mode, the most preferred first. A mode must have been loaded before the next one is asked for.
    """
    if not wanted:
        yield from [description.mode for description in registry.load_all()]
        return
    waiting = [wanted]
    for mode in waiting:  # It grows meanwhile.
        yield mode
        known = registry.descriptions.get(mode)
        if known is not None and fall_back:
            named = (known.fallback,) if isinstance(known.fallback, str) else known.fallback
            waiting += [
                name for name in dict.fromkeys(named) if name in registry.modes and name not in waiting]


def _nothing_works(registry: Registry, wanted: str, problems: dict[str, str]) -> str:
    if len(problems) == 1 and wanted:
        return f"mode {wanted} does not work on this machine: {problems[wanted]}"
    head = f"neither mode {wanted} nor what it falls back to works" if wanted else "no mode works"
    broken = [] if wanted else map(str, registry.broken)
    return "; ".join(
        [f"{head} on this machine", *(f"{mode}: {problem}" for mode, problem in problems.items()), *broken])

"""The configuration as kube-proxy 1.36 writes it with ``--write-config-to``, and then our own section."""

from typing import Any

import msgspec

from kproxy_core.config.file import API_VERSION, KIND, Kproxy, KubeProxyConfiguration
from kproxy_core.config.flags import FLAGS, Flags
from kproxy_core.config.settings import Config
from kproxy_core.model.duration import Duration

_LEFT_OUT_IF_EMPTY = frozenset({"featureGates", "splitStream", "vmodule", "windowsRunAsService"})
_SECTIONS = ("iptables", "ipvs", "nftables")
_STRING = "tag:yaml.org,2002:str"


def effective(config: Config) -> dict[str, Any]:
    """Return the content of a file for *config* in plain values.

    Without a mode it names kube-proxy's default. As there, only the section of the mode has
    periods; a file without a period means the default.
    """
    plain = _plain(config.document)
    mode = config.mode or "iptables"
    active, _ = config.document.section_of(mode)
    for name in _SECTIONS:
        if name != active:
            plain[name] |= {"syncPeriod": "0s", "minSyncPeriod": "0s"}
    everything = "nftables" if active == "nftables" else "iptables"
    for name in ("iptables", "nftables"):
        plain[name]["masqueradeAll"] = name == everything and config.masquerade_all
    if config.document.kproxy == Kproxy():
        del plain["kproxy"]
    return plain | {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "mode": mode,
        "hostnameOverride": config.hostname_override,
        "detectLocalMode": config.detect_local_mode.value,
        "healthzBindAddress": str(config.healthz_bind_address or ""),
        "metricsBindAddress": str(config.metrics_bind_address),
    }


def written(config: Config) -> str:
    import yaml  # expensive, and showing the configuration does not need it

    class Dumper(yaml.SafeDumper):
        """Quotes like Go's encoder: with double quotes if plain text would be parsed as another type."""

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        ambiguous = not text or dumper.resolve(yaml.ScalarNode, text, (True, False)) != _STRING  # type: ignore[no-untyped-call]
        return dumper.represent_scalar(_STRING, text, '"' if ambiguous else None)

    Dumper.add_representer(str, represent_text)
    return yaml.dump(effective(config), Dumper=Dumper, allow_unicode=True, width=1 << 16)


def effective_flags(flags: Flags) -> dict[str, str]:
    """Return the value of every flag, given or default, by name without dashes."""
    default = _plain(KubeProxyConfiguration())
    values = {}
    for parameter, flag in FLAGS.items():
        value: Any = default if flag.fields else ""
        for name in flag.fields[0].split(".") if flag.fields else ():
            value = value.get(name) if isinstance(value, dict) else None
        text = flags.get(parameter, "" if value is None or value == [] else value)
        if not flag.metavar and not isinstance(text, str):
            text = "true" if text else "false"
        values[flag.name] = ("" if isinstance(text, dict) else str(text)) or ("" if flag.metavar else "false")
    return dict(sorted(values.items()))


def _plain(section: msgspec.Struct) -> dict[str, Any]:
    values = {f.encode_name: _value(getattr(section, f.name)) for f in msgspec.structs.fields(section)}
    return {name: value for name, value in values.items() if value or name not in _LEFT_OUT_IF_EMPTY}


def _value(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return _plain(value)
    if isinstance(value, Duration):
        return str(value)
    if isinstance(value, tuple):
        return [_value(item) for item in value] or None
    if isinstance(value, dict):
        return {str(name): _value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    # YAML has dates, JSON has not.
    return value if isinstance(value, str | int | float | None) else str(value)

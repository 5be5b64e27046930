"""The flags of the command line: their names, help texts and defaults, and the fields that they set.

Names, meanings and defaults are those of kube-proxy 1.36. Flags of its older releases are accepted, because
manifests still use them. Imports the standard library only, so that ``--help`` and ``--version`` are fast.
"""

from typing import NamedTuple

from kproxy_core import __version__
from kproxy_core.config.release import commit, described


class Flag(NamedTuple):
    """One flag, without the dashes."""

    name: str
    metavar: str
    """"": a switch, which may be given as ``--name`` or ``--name=false``."""
    help: str = ""
    """"": ``--help`` does not show it."""
    fields: tuple[str, ...] = ()
    """The fields of the file that it sets."""
    beside_a_file: bool = False
    """It applies beside a file, and wins. A file replaces all other flags."""
    repeats: bool = False
    """Given several times, the values are joined by commas."""
    no_effect: str = ""
    """The reason why it changes nothing; "" if it does."""
    default: str = ""
    """The value that ``--help`` shows as the default; "": none, or the help tells it."""

    @property
    def parameter(self) -> str:
        return self.name.replace("-", "_")


class Flags(dict[str, str]):
    """The flags that were given, as text: parameter name (``cluster_cidr``) to value."""


_KERNELS = "0s keeps the kernel's."

RULES = (
    Flag("config", "FILE", "Configuration file, a KubeProxyConfiguration in YAML or JSON. It replaces most "
         "other flags, which are then ignored with a warning.", beside_a_file=True),
    Flag("mode", "MODE", "Proxy mode: the backend that programs this node; `kproxy modes` lists them. "
         "Overrides the configuration file. By default, the preferred mode that works on this machine.",
         ("mode",), True),
    Flag("mode-fallback", "auto|never", "What to do if the mode does not work on this machine: serve in "
         "another one (auto), or exit (never).", ("kproxy.modeFallback",), True, default="auto"),
    Flag("exclusive", "", "Exit if another kproxy serves this network namespace, instead of standing by to "
         "take over.", ("kproxy.exclusive",), True),
    Flag("manifests", "DIR", "Read the Kubernetes objects from the YAML and JSON files in DIR instead of "
         "from an API server.", ("kproxy.manifests",), True),
    Flag("hostname-override", "NAME", "Name of this node. By default, the machine's host name.",
         ("hostnameOverride",), True),
    Flag("bind-address", "IP", "IP address of this node; its family becomes the primary one. If "
         "unspecified (0.0.0.0 or ::), the address is taken from the Node object.",
         ("bindAddress",), default="0.0.0.0"),
    Flag("detect-local-mode", "METHOD", "How to recognize traffic from pods of this node: ClusterCIDR, "
         "NodeCIDR, BridgeInterface or InterfaceNamePrefix.", ("detectLocalMode",), default="ClusterCIDR"),
    Flag("cluster-cidr", "CIDRS", "Network of the cluster's pods, or one for each IP family, separated by "
         "a comma. For --detect-local-mode=ClusterCIDR.", ("clusterCIDR",)),
    Flag("pod-bridge-interface", "NAME", "Bridge that connects the pods of this node. Required by "
         "--detect-local-mode=BridgeInterface.", ("detectLocal.bridgeInterface",)),
    Flag("pod-interface-name-prefix", "PREFIX", "Start of the names of this node's pod interfaces, such as "
         "veth. Required by --detect-local-mode=InterfaceNamePrefix.", ("detectLocal.interfaceNamePrefix",)),
    Flag("nodeport-addresses", "CIDRS", "Addresses of this node that serve node ports: CIDRs separated by "
         "commas, and the words `primary` (those of the Node object), `localhost` and `all`. By default, "
         "primary in nftables and ebpf mode, and all addresses in other modes.", ("nodePortAddresses",),
         repeats=True),
    Flag("masquerade-all", "", "Masquerade all traffic to cluster IPs, that of local pods included.",
         ("iptables.masqueradeAll", "nftables.masqueradeAll")),
    Flag("iptables-masquerade-bit", "N", "Bit of the packet mark that requests masquerading, 0 to 31. Not "
         "used in nftables and ebpf mode.", ("iptables.masqueradeBit",), default="14"),
    Flag("iptables-localhost-nodeports", "", "Serve IPv4 node ports on loopback addresses in iptables "
         "mode; =false turns this off.", ("iptables.localhostNodePorts",), default="true"),
    Flag("iptables-sync-period", "DURATION", "Interval between full syncs, in every mode but ipvs.",
         ("iptables.syncPeriod", "nftables.syncPeriod"), default="30s"),
    Flag("iptables-min-sync-period", "DURATION", "Minimum interval between syncs, in every mode but ipvs. "
         "By default, and with 0s, the pause depends on the CPU time that a sync takes.",
         ("iptables.minSyncPeriod", "nftables.minSyncPeriod")),
    Flag("ipvs-sync-period", "DURATION", "Interval between full syncs in ipvs mode.",
         ("ipvs.syncPeriod",), default="30s"),
    Flag("ipvs-min-sync-period", "DURATION", "Minimum interval between syncs in ipvs mode, as "
         "--iptables-min-sync-period in the others.", ("ipvs.minSyncPeriod",)),
    Flag("ipvs-scheduler", "NAME", "Scheduler of the virtual servers, such as rr, lc or sh. By default, "
         "rr.", ("ipvs.scheduler",)),
    Flag("ipvs-exclude-cidrs", "CIDRS", "Networks, separated by commas, whose virtual servers belong to "
         "other tools and are never deleted.", ("ipvs.excludeCIDRs",), repeats=True),
    Flag("ipvs-strict-arp", "", "Set the sysctls arp_ignore to 1 and arp_announce to 2, so that an "
         "interface answers ARP requests for its own addresses only.", ("ipvs.strictARP",)),
    Flag("ipvs-tcp-timeout", "DURATION", f"Timeout of idle TCP connections. {_KERNELS}", ("ipvs.tcpTimeout",),
         default="0s"),
    Flag("ipvs-tcpfin-timeout", "DURATION", f"Timeout of TCP connections after a FIN. {_KERNELS}",
         ("ipvs.tcpFinTimeout",), default="0s"),
    Flag("ipvs-udp-timeout", "DURATION", f"Timeout of idle UDP flows. {_KERNELS}", ("ipvs.udpTimeout",),
         default="0s"),
    Flag("userspace-listen", "IP", "Bind the ports of Services at this address in userspace mode, without "
         "rules and without privileges.", ("kproxy.backendOptions.userspace.listen",), True),
    Flag("feature-gates", "GATE=BOOL", "Feature gates, separated by commas, such as "
         "AllowServiceExternalIPs=false.", ("featureGates",), repeats=True),
    Flag("plugin", "PLUGIN", "Load a plugin, given by name or module; no:NAME blocks one. May be repeated.",
         ("kproxy.plugins",), True, repeats=True),
)
"""Flags that affect the rules."""

PROCESS = (
    Flag("write-config-to", "FILE", "Write the effective configuration to FILE, as a "
         "KubeProxyConfiguration in YAML, and exit.", beside_a_file=True),
    Flag("cleanup", "", "Remove the rules of all modes, those of kube-proxy included, and exit.",
         beside_a_file=True),
    Flag("dry-run", "", "With --cleanup: only list what would be removed.", beside_a_file=True),
    Flag("own-only", "", "With --cleanup: keep everything that a running kube-proxy may use.",
         beside_a_file=True),
    Flag("init-only", "", "Do only what needs full privileges, such as setting sysctls and loading kernel "
         "modules, and exit.", beside_a_file=True),
    Flag("version", "", "Print the version and exit; =raw prints details. With =vX.Y.Z, run the proxy and "
         "report this version at /statusz.", beside_a_file=True),
    Flag("master", "URL", "URL of the API server. Overrides the one in the kubeconfig.", beside_a_file=True),
    Flag("kubeconfig", "FILE", "Kubeconfig file with the address of the API server and the credentials for "
         "it. Without one, a pod uses its service account.", ("clientConnection.kubeconfig",)),
    Flag("kube-api-content-type", "TYPE", "Content type to ask the API server for: application/json, or "
         "application/vnd.kubernetes.protobuf, which is the default.", ("clientConnection.contentType",)),
    Flag("kube-api-qps", "N", "Sustained rate of requests to the API server, in requests per second. A "
         "negative rate sets no limit.", ("clientConnection.qps",), default="5"),
    Flag("kube-api-burst", "N", "Number of requests to the API server that may be sent at once, above "
         "--kube-api-qps.", ("clientConnection.burst",), default="10"),
    Flag("config-sync-period", "DURATION", fields=("configSyncPeriod",)),
    Flag("healthz-bind-address", "IP:PORT", "Listening address of the health check server.",
         ("healthzBindAddress",), default="0.0.0.0:10256"),
    Flag("metrics-bind-address", "IP:PORT", "Listening address of the metrics server.",
         ("metricsBindAddress",), default="127.0.0.1:10249"),
    Flag("bind-address-hard-fail", "", "Exit if the health check or metrics server cannot listen, instead "
         "of retrying.", ("bindAddressHardFail",)),
    Flag("profiling", "", "Serve profiles and other debugging pages below /debug/ on the metrics server.",
         ("enableProfiling",)),
    Flag("show-hidden-metrics-for-version", "VERSION", fields=("showHiddenMetricsForVersion",)),
    Flag("oom-score-adj", "N", "OOM score adjustment of the process, -1000 to 1000.",
         ("oomScoreAdj",), default="-999"),
    Flag("conntrack-max-per-core", "N", "Maximum number of tracked connections per CPU. 0 keeps the "
         "kernel's limit, whatever --conntrack-min.", ("conntrack.maxPerCore",), default="32768"),
    Flag("conntrack-min", "N", "Lower bound of the maximum that --conntrack-max-per-core gives.",
         ("conntrack.min",), default="131072"),
    Flag("conntrack-tcp-timeout-established", "DURATION", f"Timeout of idle TCP connections. {_KERNELS}",
         ("conntrack.tcpEstablishedTimeout",), default="24h"),
    Flag("conntrack-tcp-timeout-close-wait", "DURATION",
         f"Timeout of TCP connections in CLOSE_WAIT. {_KERNELS}",
         ("conntrack.tcpCloseWaitTimeout",), default="1h"),
    Flag("conntrack-tcp-be-liberal", "", "Do not treat TCP packets outside the window as invalid.",
         ("conntrack.tcpBeLiberal",)),
    Flag("conntrack-udp-timeout", "DURATION", f"Timeout of UDP flows without a reply. {_KERNELS}",
         ("conntrack.udpTimeout",), default="0s"),
    Flag("conntrack-udp-timeout-stream", "DURATION", f"Timeout of UDP flows with replies. {_KERNELS}",
         ("conntrack.udpStreamTimeout",), default="0s"),
    Flag("v", "N", "Verbosity of the log. 2 also logs each sync; higher values log more.",
         ("logging.verbosity",), True, default="0"),
    Flag("vmodule", "PATTERN=N", "", ("logging.vmodule",), True, repeats=True),
    Flag("logging-format", "FORMAT", "Format of the log: text or json.",
         ("logging.format",), True, default="text"),
    Flag("log-flush-frequency", "DURATION", "", ("logging.flushFrequency",), True),
    Flag("log-text-split-stream", "", "", ("logging.options.text.splitStream",), True),
    Flag("log-json-split-stream", "", "", ("logging.options.json.splitStream",), True),
    Flag("log-text-info-buffer-size", "SIZE", "", ("logging.options.text.infoBufferSize",), True),
    Flag("log-json-info-buffer-size", "SIZE", "", ("logging.options.json.infoBufferSize",), True),
)
"""Flags that affect the process. Those without a help text have no effect, see `config.check`."""

SOURCES = tuple(flag for flag in PROCESS if flag.name in ("master", "kubeconfig"))
"""Flags that say where an API server is."""

_LOG_FILES = "the log is standard error"
_LOG_HEADS = "each line begins with its time and level"

OLDER = (
    # 0 disables the health server. Else these complete a --healthz-bind-address or --metrics-bind-address
    # without a port.
    Flag("healthz-port", "N"),
    Flag("metrics-port", "N"),
    Flag("cleanup-ipvs", "", beside_a_file=True),  # With =false, --cleanup keeps the rules of that mode.
    Flag("proxy-port-range", "RANGE", "", ("portRange",)),
    Flag("udp-timeout", "DURATION", "", ("udpIdleTimeout",)),
    Flag("resource-container", "NAME", no_effect="the container runtime sets the cgroup"),
    Flag("machine-id-file", "FILES", no_effect="nothing reads it", repeats=True),
    Flag("boot-id-file", "FILES", no_effect="nothing reads it", repeats=True),
    *(Flag(name, "", beside_a_file=True, no_effect=_LOG_FILES)
      for name in ("logtostderr", "alsologtostderr", "one-output")),
    *(Flag(name, "VALUE", beside_a_file=True, no_effect=_LOG_FILES)
      for name in ("log-dir", "log-file", "log-file-max-size", "stderrthreshold")),
    *(Flag(name, "", beside_a_file=True, no_effect=_LOG_HEADS)
      for name in ("skip-headers", "skip-log-headers", "add-dir-header")),
    Flag("log-backtrace-at", "WHERE", beside_a_file=True, no_effect="it names kube-proxy's source files"),
)
"""Flags accepted for old manifests."""

COMMON = (
    "mode", "config", "manifests", "kubeconfig", "master", "hostname-override", "v", "cleanup", "dry-run",
    "own-only", "version",
)  # fmt: skip
"""The flags that ``--help`` shows first."""

GROUPS = {
    "kube-proxy options: node and traffic": (
        "bind-address", "nodeport-addresses", "detect-local-mode", "cluster-cidr", "pod-bridge-interface",
        "pod-interface-name-prefix", "masquerade-all", "iptables-masquerade-bit",
        "iptables-localhost-nodeports", "iptables-sync-period", "iptables-min-sync-period", "feature-gates"),
    "kube-proxy options: ipvs mode": (
        "ipvs-sync-period", "ipvs-min-sync-period", "ipvs-scheduler", "ipvs-exclude-cidrs", "ipvs-strict-arp",
        "ipvs-tcp-timeout", "ipvs-tcpfin-timeout", "ipvs-udp-timeout"),
    "kube-proxy options: connection tracking": (
        "conntrack-max-per-core", "conntrack-min", "conntrack-tcp-timeout-established",
        "conntrack-tcp-timeout-close-wait", "conntrack-tcp-be-liberal", "conntrack-udp-timeout",
        "conntrack-udp-timeout-stream"),
    "kube-proxy options: process and API server": (
        "healthz-bind-address", "metrics-bind-address", "bind-address-hard-fail", "kube-api-content-type",
        "kube-api-qps", "kube-api-burst", "oom-score-adj", "init-only", "logging-format"),
    "kproxy options": ("mode-fallback", "exclusive", "plugin", "userspace-listen"),
    "Debugging options": ("write-config-to", "profiling"),
}  # fmt: skip
"""The other flags that ``--help`` shows, by headline."""

ALIASES = {"mode": ("--proxy-mode",), "plugin": ("-p",), "v": ("-v",)}
"""Other names of flags."""

FLAGS = {flag.parameter: flag for flag in (*RULES, *PROCESS, *OLDER)}
"""All flags by parameter name."""


def truth(text: str) -> bool:
    """Parse the value of a switch, in Go's spellings. Raises ValueError."""
    if text in ("1", "t", "T", "true", "TRUE", "True"):
        return True
    if text in ("0", "f", "F", "false", "FALSE", "False"):
        return False
    raise ValueError("must be true or false")


def spared_by_cleanup(flags: Flags) -> tuple[str, ...]:
    """Return the modes whose rules ``--cleanup`` keeps. Raises ValueError."""
    given = flags.get("cleanup_ipvs") or "true"
    try:
        return () if truth(given) else ("ipvs",)
    except ValueError as error:
        raise ValueError(f"--cleanup-ipvs: {given!r}: {error}") from error


def version_told(given: str) -> str:
    """Return the output of ``--version=given``; "": none, run the proxy. Raises ValueError."""
    if given.startswith("v"):
        import re

        if re.fullmatch(r"v\d+\.\d+\.\d+([-+][0-9A-Za-z.+-]+)?", given, re.ASCII):
            return ""
        raise ValueError("must be true, false, raw or a version such as v1.36.2")
    if given != "raw" and not truth(given):
        return ""
    return version_text(raw=given == "raw")


def version_text(*, raw: bool = False) -> str:
    """Return the version in a line for people, with *raw* including that of all else."""
    found = version_facts()
    text = f"kproxy {described(found['version'], found['commit'])}"
    if not raw:
        return text
    return (f"{text}, as kube-proxy {found['kube_proxy']}, configuration {found['configuration']}, "
            f"Python {found['python']}, {found['platform']}")


def version_facts() -> dict[str, str]:
    """Return the version of this program, and of what it is compatible with and runs on."""
    import platform

    return {
        "version": __version__, "commit": commit(), "kube_proxy": "1.36",
        "configuration": "kubeproxy.config.k8s.io/v1alpha1", "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
    }  # fmt: skip

"""The flags of the command line: names, the fields they stand for, and when they apply.

Names, meanings and defaults are kube-proxy 1.36's, and those of older releases that manifests
still carry. The standard library only: ``--help`` and ``--version`` answer at once.
"""

from typing import NamedTuple

from kproxy_core import __version__


class Flag(NamedTuple):
    """One flag, without the dashes."""

    name: str
    metavar: str
    """"": a switch, which may be given as ``--name`` or ``--name=false``."""
    help: str
    fields: tuple[str, ...] = ()
    """The fields of the file that it sets."""
    beside_a_file: bool = False
    """It applies beside a file, and wins. A file replaces all other flags."""
    repeats: bool = False
    """Given several times, the values are joined by commas."""
    no_effect: str = ""
    """The reason why it changes nothing; "" if it does."""

    @property
    def parameter(self) -> str:
        return self.name.replace("-", "_")


class Flags(dict[str, str]):
    """The flags that were given, as text: parameter name (``cluster_cidr``) to value."""


RULES = (
    Flag("config", "FILE", "A KubeProxyConfiguration; replaces most flags.", beside_a_file=True),
    Flag("mode", "MODE", "The backend: see `kproxy modes`. Wins over the file.", ("mode",), True),
    Flag("mode-fallback", "WHEN", "Where MODE does not work: auto, another may serve; never: end.",
         ("kproxy.modeFallback",), True),
    Flag("exclusive", "", "Exit instead of standing by while another kproxy serves here.",
         ("kproxy.exclusive",), True),
    Flag("manifests", "DIR", "Read Services and endpoints from files in DIR.", ("kproxy.manifests",), True),
    Flag("hostname-override", "NAME", "This node's name, if not the machine's.", ("hostnameOverride",), True),
    Flag("bind-address", "IP", "The node's own address, if not its Node object's.", ("bindAddress",)),
    Flag("detect-local-mode", "HOW", "ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix.",
         ("detectLocalMode",)),
    Flag("cluster-cidr", "CIDRS", "Networks of the pods, one of each IP family.", ("clusterCIDR",)),
    Flag("pod-bridge-interface", "NAME", "For BridgeInterface.", ("detectLocal.bridgeInterface",)),
    Flag("pod-interface-name-prefix", "PREFIX", "For InterfaceNamePrefix.",
         ("detectLocal.interfaceNamePrefix",)),
    Flag("nodeport-addresses", "CIDRS", "Networks of node ports, or `primary`.", ("nodePortAddresses",),
         repeats=True),
    Flag("masquerade-all", "", "Masquerade all traffic to Services.",
         ("iptables.masqueradeAll", "nftables.masqueradeAll")),
    Flag("iptables-masquerade-bit", "N", "Bit of the packet mark for masquerading, 0 to 31.",
         ("iptables.masqueradeBit",)),
    Flag("iptables-localhost-nodeports", "", "Serve node ports on localhost (IPv4, iptables mode).",
         ("iptables.localhostNodePorts",)),
    Flag("iptables-sync-period", "TIME", "Between full syncs, e.g. 30s; for every mode but ipvs.",
         ("iptables.syncPeriod", "nftables.syncPeriod")),
    Flag("iptables-min-sync-period", "TIME", "Between any two syncs; for every mode but ipvs.",
         ("iptables.minSyncPeriod", "nftables.minSyncPeriod")),
    Flag("ipvs-sync-period", "TIME", "Between full syncs in ipvs mode.", ("ipvs.syncPeriod",)),
    Flag("ipvs-min-sync-period", "TIME", "Between any two syncs in ipvs mode.", ("ipvs.minSyncPeriod",)),
    Flag("ipvs-scheduler", "NAME", "For ipvs mode; without it rr.", ("ipvs.scheduler",)),
    Flag("ipvs-exclude-cidrs", "CIDRS", "Virtual servers there are left alone.", ("ipvs.excludeCIDRs",),
         repeats=True),
    Flag("ipvs-strict-arp", "", "Set arp_ignore to 1 and arp_announce to 2.", ("ipvs.strictARP",)),
    Flag("ipvs-tcp-timeout", "TIME", "Of idle TCP connections; 0: the kernel's.", ("ipvs.tcpTimeout",)),
    Flag("ipvs-tcpfin-timeout", "TIME", "After a FIN; 0: the kernel's.", ("ipvs.tcpFinTimeout",)),
    Flag("ipvs-udp-timeout", "TIME", "Of UDP flows; 0: the kernel's.", ("ipvs.udpTimeout",)),
    Flag("userspace-listen", "IP", "Mode userspace: bind the Services' ports here; needs no privileges.",
         ("kproxy.backendOptions.userspace.listen",), True),
    Flag("feature-gates", "GATE=BOOL", "Features on or off.", ("featureGates",), repeats=True),
    Flag("plugin", "PLUGIN", "Load a plugin, by name or module; no:NAME keeps one out.",
         ("kproxy.plugins",), True, repeats=True),
)
"""Flags that affect the rules."""

PROCESS = (
    Flag("write-config-to", "FILE", "Write the configuration in effect, and exit.", beside_a_file=True),
    Flag("cleanup", "", "Remove all rules of all modes, and exit.", beside_a_file=True),
    Flag("dry-run", "", "With --cleanup: only say what would be removed.", beside_a_file=True),
    Flag("own-only", "", "With --cleanup: leave what a running kube-proxy may use.", beside_a_file=True),
    Flag("init-only", "", "Do what needs all privileges, and exit.", beside_a_file=True),
    Flag("version", "", "Print the version and exit; =raw: in detail; =vX.Y.Z: report that one.",
         beside_a_file=True),
    Flag("master", "URL", "The API server.", beside_a_file=True),
    Flag("kubeconfig", "FILE", "Where the API server is, and the credentials for it.",
         ("clientConnection.kubeconfig",)),
    Flag("kube-api-content-type", "TYPE", "JSON is asked for in any case.",
         ("clientConnection.contentType",)),
    Flag("kube-api-qps", "N", "Requests to the API server for each second.", ("clientConnection.qps",)),
    Flag("kube-api-burst", "N", "Requests that may be made at once.", ("clientConnection.burst",)),
    Flag("config-sync-period", "TIME", "Has no effect: watches need no resync.", ("configSyncPeriod",)),
    Flag("healthz-bind-address", "IP:PORT", "For health checks.", ("healthzBindAddress",)),
    Flag("metrics-bind-address", "IP:PORT", "For metrics.", ("metricsBindAddress",)),
    Flag("bind-address-hard-fail", "", "End if the health or metrics server can't listen.",
         ("bindAddressHardFail",)),
    Flag("profiling", "", "Debugging endpoints on the metrics server.", ("enableProfiling",)),
    Flag("show-hidden-metrics-for-version", "VERSION", "The previous minor version; none are hidden.",
         ("showHiddenMetricsForVersion",)),
    Flag("oom-score-adj", "N", "For this process, -1000 to 1000.", ("oomScoreAdj",)),
    Flag("conntrack-max-per-core", "N", "Tracked connections for each CPU; 0: leave the limit.",
         ("conntrack.maxPerCore",)),
    Flag("conntrack-min", "N", "Tracked connections at least.", ("conntrack.min",)),
    Flag("conntrack-tcp-timeout-established", "TIME", "Of idle TCP connections; 0: the kernel's.",
         ("conntrack.tcpEstablishedTimeout",)),
    Flag("conntrack-tcp-timeout-close-wait", "TIME", "In CLOSE_WAIT; 0: the kernel's.",
         ("conntrack.tcpCloseWaitTimeout",)),
    Flag("conntrack-tcp-be-liberal", "", "Do not take packets outside the TCP window for invalid.",
         ("conntrack.tcpBeLiberal",)),
    Flag("conntrack-udp-timeout", "TIME", "Of UDP without an answer; 0: the kernel's.",
         ("conntrack.udpTimeout",)),
    Flag("conntrack-udp-timeout-stream", "TIME", "Of UDP with answers; 0: the kernel's.",
         ("conntrack.udpStreamTimeout",)),
    Flag("v", "N", "Log more: 2 shows each sync.", ("logging.verbosity",), True),
    Flag("vmodule", "PATTERN=N", "Has no effect: it names kube-proxy's source files.", ("logging.vmodule",),
         True, repeats=True),
    Flag("logging-format", "FORMAT", "Of the log lines: text or json.", ("logging.format",), True),
    Flag("log-flush-frequency", "TIME", "Has no effect: each line is written at once.",
         ("logging.flushFrequency",), True),
    Flag("log-text-split-stream", "", "Has no effect: the log is standard error.",
         ("logging.options.text.splitStream",), True),
    Flag("log-json-split-stream", "", "Has no effect, as --log-text-split-stream.",
         ("logging.options.json.splitStream",), True),
    Flag("log-text-info-buffer-size", "SIZE", "Has no effect: nothing is buffered.",
         ("logging.options.text.infoBufferSize",), True),
    Flag("log-json-info-buffer-size", "SIZE", "Has no effect: nothing is buffered.",
         ("logging.options.json.infoBufferSize",), True),
)
"""Flags that affect the process."""

_LOG_FILES = "the log is standard error"
_LOG_HEADS = "each line begins with its time and level"

SOURCES = tuple(flag for flag in PROCESS if flag.name in ("master", "kubeconfig"))
"""Flags that say where an API server is."""

OLDER = (
    Flag("healthz-port", "N", "0: no health server; else for a --healthz-bind-address without a port."),
    Flag("metrics-port", "N", "For a --metrics-bind-address without a port."),
    Flag("cleanup-ipvs", "", "=false with --cleanup: leave the rules of that mode.", beside_a_file=True),
    Flag("proxy-port-range", "RANGE", "", ("portRange",)),
    Flag("udp-timeout", "TIME", "", ("kproxy.backendOptions.userspace.udpIdleTimeout",)),
    Flag("resource-container", "NAME", "", no_effect="the container runtime sets the cgroup"),
    Flag("machine-id-file", "FILES", "", no_effect="nothing reads it", repeats=True),
    Flag("boot-id-file", "FILES", "", no_effect="nothing reads it", repeats=True),
    *(Flag(name, "", "", beside_a_file=True, no_effect=_LOG_FILES)
      for name in ("logtostderr", "alsologtostderr", "one-output")),
    *(Flag(name, "VALUE", "", beside_a_file=True, no_effect=_LOG_FILES)
      for name in ("log-dir", "log-file", "log-file-max-size", "stderrthreshold")),
    *(Flag(name, "", "", beside_a_file=True, no_effect=_LOG_HEADS)
      for name in ("skip-headers", "skip-log-headers", "add-dir-header")),
    Flag("log-backtrace-at", "WHERE", "", beside_a_file=True, no_effect="it names kube-proxy's source files"),
)
"""Flags accepted for old manifests, and not shown by ``--help``."""

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
    return () if truth(flags.get("cleanup_ipvs") or "true") else ("ipvs",)


def version_told(given: str) -> str:
    """Return the output of ``--version=given``; "": none, run the proxy. Raises ValueError."""
    if given.startswith("v"):
        import re

        if re.fullmatch(r"v\d+\.\d+\.\d+([-+][0-9A-Za-z.+-]+)?", given, re.ASCII):
            return ""
        raise ValueError("must be true, false, raw or a version such as v1.36.2")
    if given != "raw" and not truth(given):
        return ""
    from kproxy_core.config.release import commit

    found = commit()
    version = f"kproxy {__version__} (commit {found})" if found else f"kproxy {__version__}"
    if given != "raw":
        return version
    import platform

    return (f"{version}, as kube-proxy 1.36, configuration kubeproxy.config.k8s.io/v1alpha1, "
            f"Python {platform.python_version()}, {platform.system()} {platform.release()} "
            f"{platform.machine()}")

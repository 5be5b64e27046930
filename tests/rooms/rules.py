"""The architecture's rules as functions: each yields what is wrong with a module, in a sentence.

The drawing and the reasons are in ARCHITECTURE.md, "Who may import whom".
"""

import ast
import re
from collections.abc import Iterator

from kproxy_core.contract.public import PUBLIC
from tests.rooms.modules import Module
from tests.rooms.surface import PUBLIC_NAMES, names_of_the_core

ROOMS: dict[str, frozenset[str]] = {
    "model": frozenset(),
    "netlink": frozenset({"model"}),
    "nft": frozenset({"netlink", "model"}),
    "plan": frozenset({"model"}),
    "linux": frozenset({"nft", "netlink", "plan", "model"}),
    "contract": frozenset({"linux", "plan", "model"}),
    "config": frozenset({"model"}),
    "kube": frozenset({"linux", "netlink", "model"}),
    "sync": frozenset({"kube", "contract", "linux", "netlink", "plan", "model"}),
    "observe": frozenset({"sync", "kube", "contract", "linux", "netlink", "plan", "model"}),
    "modes": frozenset({"observe", "sync", "config", "contract", "linux", "plan", "model"}),
    "app": frozenset(
        {"modes", "observe", "sync", "kube", "config", "contract", "linux", "nft", "netlink", "plan",
         "model"}),
    "fleet": frozenset({"app", "observe", "kube", "plan", "model"}),
    "kit": frozenset(
        {"app", "modes", "sync", "kube", "config", "linux", "nft", "netlink", "contract", "plan", "model"}),
}  # fmt: skip
"""The rooms of the core that each room may import, apart from itself. `cli` may import all. The kit, a
distribution of its own, counts as one."""

THIRD_PARTY: dict[str, frozenset[str]] = {
    "model": frozenset({"msgspec"}),
    "plan": frozenset({"msgspec"}),
    "netlink": frozenset(),
    "nft": frozenset(),
    "linux": frozenset({"msgspec", "nftables"}),
    "contract": frozenset({"msgspec", "pluggy"}),
    "config": frozenset({"msgspec", "yaml"}),
    "kube": frozenset({"google", "kubernetes", "msgspec", "urllib3", "yaml"}),
    "sync": frozenset({"msgspec"}),
    "observe": frozenset({"h11", "msgspec", "prometheus_client"}),
    "modes": frozenset({"msgspec"}),
    "app": frozenset({"msgspec"}),
    "fleet": frozenset({"kubernetes", "msgspec", "urllib3", "websocket"}),
    "kit": frozenset({"msgspec", "pyroute2", "pytest", "wsproto", "yaml"}),
    "cli": frozenset({"click", "msgspec", "rich", "yaml"}),
}
"""Packages from outside that each room imports; docs/design/dependencies.md has the cost of each."""

THIRD_PARTY_OF_PLUGINS: dict[str, frozenset[str]] = {
    "kproxy_ebpf": frozenset({"msgspec"}),
    "kproxy_ipvs": frozenset({"msgspec", "pyroute2"}),
    "kproxy_nftables": frozenset({"msgspec"}),
    "kproxy_userspace": frozenset({"msgspec"}),
}
"""Packages from outside that each plugin imports."""

FROM_THE_DISTRIBUTION = frozenset({"nftables"})
"""Packages that pip cannot install."""

IMPORTED_AS = {
    "protobuf": "google", "prometheus-client": "prometheus_client", "python3-nftables": "nftables",
    "pyyaml": "yaml", "websocket-client": "websocket",
}  # fmt: skip
"""Modules of distributions with another name."""

PLUGINS_MAY_IMPORT = frozenset({"contract", *(module.split(".")[1] for module in PUBLIC)})
"""The rooms with public names."""

PURE_MODULES = frozenset(
    {"settings", "wanted", "applied", "skeleton", "names", "batch", "rules", "walk", "removal",
     "counting", "packets"}
)
"""The modules of a plugin that only compute; each backend that has one has it under this name."""

ACTING_MODULES = frozenset(
    {"backend", "kernel", "watch", "detect", "cleanup", "retire", "explain", "render", "traffic", "metrics"}
)
"""The modules and packages of a backend that may do input and output."""

ROLES = PURE_MODULES | ACTING_MODULES | {"hooks", "family"}
"""The names of a backend's modules and packages, the same in each."""

INPUT_AND_OUTPUT = frozenset({"socket", "subprocess", "os", "pyroute2", "kubernetes", "logging", "time"})

ONLY_COMPUTES = frozenset({("kproxy_core.model.address", "socket")})
"""Imports that look like input or output and are not: inet_pton and inet_ntop."""

ONLY_ENCODE = (
    "kproxy_core.netlink.messages", "kproxy_core.nft.messages", "kproxy_core.nft.rules",
    "kproxy_core.nft.elements", "kproxy_core.nft.objects", "kproxy_core.nft.interpret",
    "kproxy_core.nft.packet", "kproxy_core.nft.xt", "kproxy_core.nft.expressions",
    "kproxy_core.linux.relay.orders",
)
"""The pure modules of rooms with input and output, which pure modules may import."""

ONLY_ANSWERS = (
    "kproxy_core.app.changes", "kproxy_core.app.doctor", "kproxy_core.app.drops", "kproxy_core.app.explain",
    "kproxy_core.app.passage", "kproxy_core.app.probe", "kproxy_core.app.programs",
    "kproxy_core.app.verify", "kproxy_core.fleet.explain", "kproxy_core.fleet.lags",
    "kproxy_core.fleet.objects", "kproxy_core.fleet.switch",
)
"""The modules of other rooms that only compute."""

BACKENDS = ("nftables", "iptables", "ipvs", "userspace", "ebpf")

NAMES_A_BACKEND = frozenset((
    *(f"kproxy_conformance.{name}" for name in (
        "checks.kernel_state", "checks.rendering", "drivers.driver", "suite.evidence", "__main__")),
    *(f"kproxy_core.{name}" for name in (
        "config.settings", "config.check", "config.file", "config.flags",
        "cli.report", "cli.unit",
        "linux.libnftables_child", "linux.libnftables", "sync.node_port_relays", "app.doctor", "app.programs",
        "cli.doctor",
        "linux.node_state", "contract.public",
    )),
))  # fmt: skip
"""KubeProxyConfiguration has a section and flags for each of kube-proxy's modes; the kit and reports read the
rules that iptables' programs left in a kernel; the doctor and remedies name settings, programs and modes that
write chains of kube-proxy's; libnftables is the name of a library, and nftables.service the unit of a
distribution that loads its rules; kube-proxy names its metrics of relays after the only mode that has any."""

SHARED_BY_PLUGINS = frozenset({"kproxy_bpf", "kproxy_nft", "kproxy_xtables"})
"""Packages beside the plugins that any plugin may import."""

NFT_SAYS = frozenset({"inet_service", "kproxy.nft"})
"""nf_tables' type of ports, and the name of a log."""

NAMES_THAT_SAY_NOTHING = frozenset({"common", "helper", "helpers", "misc", "tools", "util", "utils"})


def rooms_of_the_core(module: Module) -> Iterator[str]:
    """A module of the core imports what its room may, and never a plugin."""
    for imported in module.imports():
        where = f"{module.name}:{imported.line} imports {imported.module}"
        if imported.top == "kproxy_core":
            others = {*ROOMS, "cli"} - {module.room} - ROOMS.get(module.room, frozenset(ROOMS))
            if imported.room in others:
                yield f"{where}: not for {module.room or 'the package itself'}"
        elif imported.top == module.top:
            continue
        elif imported.top.startswith("kproxy_") or imported.top in ("plugins", "tests"):
            yield f"{where}: the core knows no plugin"
        elif not imported.from_standard_library and imported.top not in THIRD_PARTY.get(module.room, ()):
            yield f"{where}: not for {module.room or 'the package itself'}"


def plugins_know_the_contract(module: Module) -> Iterator[str]:
    """A plugin imports the public names of the core, and no other plugin."""
    for name, line in names_of_the_core(module):
        if name not in PUBLIC_NAMES:
            yield f"{module.name}:{line} uses {name}, which is not public: see kproxy_core.contract.public"
    for imported in module.imports():
        where = f"{module.name}:{imported.line} imports {imported.module}"
        if imported.top == "kproxy_core":
            continue
        if imported.top.startswith("kproxy_"):
            if imported.top not in {module.top, *SHARED_BY_PLUGINS}:
                yield f"{where}: plugins do not know each other"
        elif (not imported.from_standard_library
              and imported.top not in THIRD_PARTY_OF_PLUGINS.get(module.top, ())):
            yield f"{where}: not for {module.top}"


def plugins_speak_one_grammar(module: Module) -> Iterator[str]:
    """Each module of a backend is named for its role, and only some roles touch the kernel."""
    if module.top in SHARED_BY_PLUGINS or not module.room:
        return
    if module.room not in ROLES:
        yield f"{module.name}: {module.room!r} is no role, see ARCHITECTURE.md"
    if module.room in ACTING_MODULES or module.room == "hooks":
        return
    for imported in module.imports():
        acts = imported.top in INPUT_AND_OUTPUT - {"logging", "time"} or (
            imported.module.startswith("kproxy_core.linux.")
            and not imported.module.startswith(
                ("kproxy_core.linux.errors", "kproxy_core.linux.relay.pool", *ONLY_ENCODE)))
        if acts:
            yield f"{module.name}:{imported.line} imports {imported.module}: this belongs in kernel"


def pure_modules_do_no_io(module: Module) -> Iterator[str]:
    """model, plan and modules that only compute import no input or output, nor a module that does."""
    pure_plugin = module.top != "kproxy_core" and _role(module.name) in PURE_MODULES
    pure_core = module.room in ("model", "plan") or module.name in (*ONLY_ENCODE, *ONLY_ANSWERS)
    if not pure_plugin and not pure_core:
        return
    for imported in module.imports():
        where = f"{module.name}:{imported.line} imports {imported.module}"
        if imported.top in INPUT_AND_OUTPUT and (module.name, imported.top) not in ONLY_COMPUTES:
            yield f"{where}: this module only computes"
        elif (pure_plugin and imported.top in {module.top, *SHARED_BY_PLUGINS}
              and _role(imported.module) not in PURE_MODULES):
            yield f"{where}: a pure module imports pure modules only"
        elif pure_plugin and imported.module.startswith(ONLY_ENCODE):
            continue
        elif pure_plugin and (imported.top, imported.room) == ("kproxy_core", "linux"):
            yield f"{where}: linux is input and output"


def _role(name: str) -> str:
    """Return the role of a plugin's module *name*: the second part."""
    return [*name.split("."), ""][1]


def core_names_no_backend(module: Module) -> Iterator[str]:
    """No string or name of the core contains the name of a backend."""
    if module.name in NAMES_A_BACKEND:
        return
    for word, line in module.words():
        for backend in BACKENDS:
            if backend in word.lower():
                yield f"{module.name}:{line} says {word!r}: the core knows no backend by name"


def nft_knows_no_service(module: Module) -> Iterator[str]:
    """No string or name of nft is about Services or their proxies: it could be a package of its own."""
    if module.room != "nft":
        return
    for word, line in module.words():
        if re.search("kproxy|kube|service", word.lower()) and word not in NFT_SAYS:
            yield f"{module.name}:{line} says {word!r}: nft knows no service proxy"


def has_one_purpose(module: Module) -> Iterator[str]:
    if module.last in NAMES_THAT_SAY_NOTHING:
        yield f"{module.name}: a module is named after its purpose"
    if module.name != "kproxy_core" and not ast.get_docstring(module.tree):
        yield f"{module.name} does not say what it is for: it has no docstring"


def tests_can_fail(module: Module) -> Iterator[str]:
    """Each test asserts something, and none is skipped."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not _judges(node):
            yield f"{module.name}:{node.lineno} {node.name} asserts nothing"
        if isinstance(node, ast.Attribute) and node.attr in ("skip", "skipif", "importorskip", "xfail"):
            yield f"{module.name}:{node.lineno} uses {node.attr}: a test that does not run proves nothing"


def _judges(test: ast.FunctionDef) -> bool:
    """Return whether it can fail: by an assertion, a check elsewhere, or a limited wait."""
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("raises", "fail", "wait_for"):
                return True
            if called.startswith(("assert_", "check_", "expect_")):
                return True
    return False

"""Network plugins (CNI), called as a container runtime calls them: https://www.cni.dev/docs/spec/."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kproxy_conformance.network.namespaces import CommandFailed, Namespace, run
from kproxy_conformance.network.rights import MissingRight

DIRECTORIES = (Path("/usr/lib/cni"), Path("/usr/libexec/cni"), Path("/opt/cni/bin"))
"""Where Debian, Fedora, and the network agents of most clusters install plugins."""
VERSION = "0.4.0"


class Place(NamedTuple):
    """What host-local gives a pod in one IP family."""

    address: str
    network: str
    gateway: str


class Cni:
    """The plugins of one node, and the addresses that they have given."""

    def __init__(self, node: Namespace, leases: Path) -> None:
        """*leases*: directory for host-local's files. Raises MissingRight without plugins."""
        self._node = node
        self._leases = leases
        found = [path for path in DIRECTORIES if (path / "host-local").exists()]
        if not found:
            raise MissingRight("network plugins", "the package containernetworking-plugins is not installed")
        self._programs = found[0]

    def add(
        self, pod: Namespace, places: Sequence[Place], plugins: Iterable[Mapping[str, Any]]
    ) -> None:
        """Attach *pod* by *plugins* in their order, as those of a list of configurations.

        *places*: one for each IP family. Raises MissingRight if a plugin fails.
        """
        ranges = [[{"subnet": place.network, "rangeStart": place.address, "rangeEnd": place.address,
                    "gateway": place.gateway}] for place in places]  # fmt: skip
        routes = [{"dst": "::/0" if ":" in place.address else "0.0.0.0/0"} for place in places]
        ipam = {"type": "host-local", "dataDir": str(self._leases), "ranges": ranges, "routes": routes}
        result: Any = None
        for plugin in plugins:
            # Each pod has a network of its own name: host-local keeps what it gave by that.
            config = {"cniVersion": VERSION, "name": f"kc-{pod.name}", **plugin}
            config |= {"prevResult": result} if result else {"ipam": ipam}
            result = self._call("ADD", pod, config) or result

    def _call(self, command: str, pod: Namespace, config: Mapping[str, Any]) -> Any:
        environment = {
            "CNI_COMMAND": command, "CNI_CONTAINERID": f"kc-{pod.name}", "CNI_NETNS": pod.path,
            "CNI_IFNAME": "eth0", "CNI_PATH": str(self._programs),
        }  # fmt: skip
        program = str(self._programs / config["type"])
        with self._node.joined():
            try:
                answer = run("env", *(f"{name}={value}" for name, value in environment.items()), program,
                             stdin=json.dumps(config))
            except CommandFailed as error:
                raise MissingRight(f"network plugin {config['type']}", str(error)) from error
        return json.loads(answer) if answer.strip() else None

"""kproxy installed from its wheel, without extras: it serves, and names what is missing for the rest.

In virtual environments of the Pythons of this machine, of Debian 13 and 14, of Ubuntu 24.04, and of a Python
that is not the release's.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.core.bpf_places import inside, new_cgroup
from tests.core.namespaces import Namespace, namespace, own_network
from tests.core.processes import started
from tests.install.packages import VERSION
from tests.install.places import BINDING, CHECKOUT, ELSEWHERE, Place, on_debian, on_this_machine
from tests.patience import PATIENCE

__all__ = ["own_network"]

pytestmark = pytest.mark.usefixtures("own_network")

Where = Callable[[Path, Path], AbstractContextManager[Place]]

PLACES: dict[str, Where] = {
    "machine": on_this_machine,
    "debian-13": partial(on_debian, suite="trixie", python="3.13", own_python=True),
    "debian-13-other-python": partial(on_debian, suite="trixie", python="3.11", own_python=False),
    "debian-14": partial(on_debian, suite="forky", python="3.14", own_python=True),
    "ubuntu-24.04": partial(on_debian, suite="noble", python="3.12", own_python=True),
}
WEB = """
apiVersion: kproxy.dev/v1
kind: Forward
name: web
listen: ["10.96.0.10:80"]
to: ["10.1.1.11:8080"]
"""
CONFIG = """
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
conntrack: {maxPerCore: 0, min: 0}
kproxy: {modeFallback: never, backendOptions: {ebpf: {cgroup: %s, pinDirectory: /run/bpf/kproxy}}}
"""
DIAL = "import socket; print(socket.create_connection(('10.96.0.10', 80), 60).makefile().read())"
SERVER = """
import socket
server = socket.create_server(("10.1.1.11", 8080))
print("ready", flush=True)
while True:
    server.accept()[0].sendall(b"hello from the pod")
"""


@pytest.fixture(scope="module", params=PLACES)
def place(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    with PLACES[request.param](wheel, tmp_path_factory.mktemp(request.param) / "place") as made:
        yield made


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


def missing(mode: str, place: Place) -> dict[str, str]:
    """Return the remedies of what *mode* lacks, by requirement."""
    report = json.loads(place.kproxy("modes", mode, "--probe", "--output=json").stdout)
    (found,) = report["modes"]
    assert found["usable"] == all(one["met"] for one in found["requirements"])
    return {one["what"]: one["remedy"] for one in found["requirements"] if not one["met"]}


def test_the_version_is_that_of_the_checkout(place: Place) -> None:
    done = place.kproxy("--version")
    assert done.stdout.startswith(f"kproxy {VERSION} ("), done.stderr


def test_the_classifiers_name_the_python_that_serves(place: Place) -> None:
    show = "import platform; print('{}.{}'.format(*platform.python_version_tuple()))"
    version = place.run(f"{place.programs}/python", "-c", show).stdout.strip()
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]


def test_the_modes_that_need_nothing_else_work(place: Place) -> None:
    assert missing("nftables", place) == {}
    assert missing("userspace", place) == {}


@pytest.mark.parametrize("mode", ["nftables", "ebpf"])
def test_a_packet_is_answered(place: Place, node: Namespace, tmp_path: Path, mode: str) -> None:
    """Mode ebpf does not compile its programs: no place but this machine has bcc."""
    files = tmp_path / mode
    (files / "manifests").mkdir(parents=True)
    (files / "manifests" / "web.yaml").write_text(WEB)
    with namespace() as pod, new_cgroup() as cgroup:
        (files / "config.yaml").write_text(CONFIG % cgroup)
        at = place.put(files)
        # Without files of other tests in /run: the journal, the lock and the cache of programs.
        private = 'mount -t tmpfs tmpfs /run; mkdir /run/bpf; exec "$@"'
        command = ["unshare", "--mount", "sh", "-ec", private, "sh", f"{place.programs}/kproxy",
                   f"--mode={mode}", "--hostname-override=node1",
                   f"--manifests={at}/manifests", f"--config={at}/config.yaml"]
        node.add_veth("pod", pod, "eth0")
        node.add_address("10.1.1.1/24", "pod")
        node.add_route("0.0.0.0/0", via="10.1.1.11")
        pod.add_address("10.1.1.11/24", "eth0")
        with (subprocess.Popen(["ip", "netns", "exec", pod.name, sys.executable, "-c", SERVER],
                               stdout=subprocess.PIPE) as server,
              started(node, ["ip", "netns", "exec", node.name, *place.command(*command)]) as proxy):
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == b"ready\n"
                proxy.await_health()
                dial = inside(cgroup, ["ip", "netns", "exec", node.name, sys.executable, "-c", DIAL])
                done = subprocess.run(dial, capture_output=True, text=True, check=False, timeout=PATIENCE)
                assert done.stdout == "hello from the pod\n", done.stderr
                metrics = proxy.get(10249, "/metrics")[1]
                assert ("\nkproxy_ebpf_attached 1\n" in metrics) == (mode == "ebpf")
            finally:
                server.kill()


@pytest.mark.parametrize(("program", "arguments", "said"), [
    ("kproxy", ["--kubeconfig=/etc/kubeconfig"],
     "--kubeconfig needs the packages kubernetes and urllib3: {api}"),
    ("kproxy", ["--master=http://127.0.0.1:1"], "--master needs the package urllib3: {api}"),
    ("kproxy", ["explain", "10.96.0.10:80", "--kubeconfig=/etc/kubeconfig"],
     "--kubeconfig needs the packages kubernetes and urllib3: {api}"),
    ("kproxy", ["top"], "kproxy top needs the package rich: {top}; --output=json needs no other package"),
    ("kubectl-kproxy", ["status"],
     "kubectl kproxy needs the packages kubernetes, urllib3 and websocket-client: {api}"),
], ids=["kubeconfig", "master", "explain", "top", "kubectl"])
def test_a_missing_extra_is_named_with_its_command(
    place: Place, program: str, arguments: list[str], said: str
) -> None:
    done = place.run(f"{place.programs}/{program}", *arguments)
    commands = {extra: f"pip install 'kproxy[{extra}]=={VERSION}'" for extra in ("api", "top")}
    assert (done.returncode, done.stderr) == (1, f"Error: {said.format(**commands)}\n")


def test_a_missing_extra_of_a_mode_is_a_requirement_of_it(place: Place) -> None:
    remedy = f"pip install 'kproxy[ipvs]=={VERSION}'"
    assert missing("ipvs", place)["Python package pyroute2"] == remedy


def test_a_missing_binding_is_named_with_its_package(place: Place, tmp_path: Path) -> None:
    """That of the distribution's Python serves any other one, too."""
    (tmp_path / "none").mkdir()
    check = ["render", "--mode=nftables", "--check", "--hostname-override=node1",
             f"--manifests={place.put(tmp_path / 'none')}"]
    if place.system is not None:
        done = place.kproxy(*check)
        assert done.returncode == 1
        assert "as root: apt-get install python3-nftables" in done.stderr
        assert "Traceback" not in done.stderr
        assert place.run("mv", ELSEWHERE, BINDING).returncode == 0
    done = place.kproxy(*check)
    assert "the IPv4 rules of mode nftables are accepted" in done.stdout, done.stderr

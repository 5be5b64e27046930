"""The page ``/debug/kproxy/`` in a real browser: it shows the manifests' content, none of which runs."""

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.browser.browser import Browser, browser
from tests.core.directory_rig import NODE, endpoint_slice, service
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import Proxy, running

PAGE = "http://127.0.0.1:10249/debug/kproxy/"
HOSTILE = "<img src=x onerror=document.title='owned'>"


class Room:
    """A proxy on a node, and a browser there."""

    def __init__(self, node: Namespace, manifests: Path, proxy: Proxy, window: Browser) -> None:
        self.node, self.manifests, self.proxy, self.window = node, manifests, proxy, window

    def write(self, name: str, *objects: dict[str, Any]) -> None:
        new = self.manifests / f".{name}"
        new.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
        new.rename(self.manifests / f"{name}.json")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    directory = tmp_path_factory.mktemp("browser")
    manifests = directory / "manifests"
    manifests.mkdir()
    config = directory / "config.json"
    config.write_text(json.dumps({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "mode": "nftables", "enableProfiling": True, "conntrack": {"maxPerCore": 0}, "hostnameOverride": NODE,
        "kproxy": {"manifests": str(manifests), "trafficMetrics": "endpoint",
                   "stateDirectory": str(directory / "state")},
    }))  # fmt: skip
    with ExitStack() as stack:
        node = stack.enter_context(namespace())
        subprocess.run(["ip", "-n", node.name, "route", "add", "10.96.0.0/16", "dev", "lo"], check=True)
        proxy = stack.enter_context(running(node, "--config", str(config)))
        proxy.await_health()
        window = stack.enter_context(browser(node, directory))
        made = Room(node, manifests, proxy, window)
        made.write("web", service("web", "10.96.7.1"), endpoint_slice("web", "10.1.7.5"),
                   service("empty", "10.96.7.2"))
        made.write("many", *(service(f"many-{number:03}", f"10.96.8.{number}") for number in range(1, 121)))
        window.open(PAGE)
        window.wait("document.getElementById('services').rows.length == 50")
        yield made


def search(window: Browser, text: str) -> None:
    window.run("const at = document.getElementById('search'); at.value = arguments[0];"
               "at.dispatchEvent(new Event('input'))", text)


def test_it_loads_without_complaints(room: Room) -> None:
    room.window.complaints()
    room.window.open(PAGE)
    room.window.wait("document.getElementById('services').rows.length == 50")
    assert room.window.complaints() == []
    assert "nftables" in room.window.text
    assert "well" in room.window.text
    assert "kernel objects" in room.window.text


def test_it_shows_services_with_frontends_endpoints_and_problems(room: Room) -> None:
    search(room.window, "default/web")
    room.window.wait("document.body.innerText.includes('1 to 1 of 1')")
    assert "10.96.7.1:80" in room.window.text
    room.window.run("document.querySelector('#services button').click()")
    room.window.wait("document.getElementById('services').innerText.includes('10.1.7.5:8080')")
    search(room.window, "empty")
    room.window.wait("document.getElementById('services').innerText.includes('no endpoints')")


def test_it_counts_connections(room: Room) -> None:
    search(room.window, "empty")
    room.window.wait("document.getElementById('services').innerText.includes('default/empty')")
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            room.node.inside(lambda: socket.create_connection(("10.96.7.2", 80), 5))
    room.window.wait("document.querySelector('[data-label=Rejected]').innerText == '3'")


def test_it_has_pages_of_services(room: Room) -> None:
    search(room.window, "many")
    room.window.wait("document.body.innerText.includes('1 to 50 of 120')")
    room.window.run("document.getElementById('next').click()")
    room.window.wait("document.body.innerText.includes('51 to 100 of 120')")
    room.window.run("document.getElementById('next').click()")
    room.window.wait("document.body.innerText.includes('101 to 120 of 120')")
    assert room.window.run("return document.getElementById('next').disabled")


def test_it_follows_a_change(room: Room) -> None:
    search(room.window, "later")
    room.window.wait("document.body.innerText.includes('none of')")
    room.write("later", service("later", "10.96.7.9"))
    assert room.window.wait("document.getElementById('services').innerText.includes('10.96.7.9:80')")


def test_it_explains_a_packet(room: Room) -> None:
    room.window.type("[name=to]", "10.96.7.1:80\n")
    room.window.wait("document.getElementById('answer').innerText.includes('kernel agrees')")
    assert "10.1.7.5:8080" in room.window.run("return document.getElementById('answer').innerText")
    room.window.run("document.getElementById('explain').reset()")
    room.window.type("[name=to]", "nonsense\n")
    room.window.wait("document.querySelector('#answer .bad')")


def test_names_are_text(room: Room) -> None:
    """Names are checked long before; the page must not rely on it."""
    window = room.window
    row = {"service_port": HOSTILE, "protocol": HOSTILE, "problems": [HOSTILE], "frontends": [HOSTILE],
           "endpoints": [{"endpoint": HOSTILE, "usable": True}], "endpoint_count": 1}
    window.run("state.open.add(arguments[0] + ' ' + arguments[0]);"
               "document.querySelector('main').append(row(arguments[1]))", HOSTILE, row)
    window.wait("document.body.innerText.split(arguments[0]).length == 6", HOSTILE)
    window.type("[name=to]", f"default/web:{HOSTILE}\n")
    window.wait("document.getElementById('answer').innerText.includes('<img')")
    assert window.run("return document.querySelectorAll('main img, main script').length") == 0
    assert window.run("return document.title") == f"kproxy on {NODE}"
    window.open(PAGE)


def test_the_keyboard_is_enough(room: Room) -> None:
    search(room.window, "")
    room.window.run("document.activeElement.blur()")
    room.window.press("/web")
    room.window.wait("document.getElementById('search').value == 'web'")
    room.window.wait("document.body.innerText.includes('1 to 1 of 1')")
    room.window.press("\ue004\ue004\ue004\ue004")
    focused = "document.activeElement.getAttribute('aria-expanded')"
    tabs = 0
    while room.window.run(f"return {focused}") is None:
        tabs += 1
        assert tabs < 10
        room.window.press("\ue004")
    before = room.window.run(f"return {focused}")
    room.window.press("\ue007")
    room.window.wait(f"{focused} && {focused} != arguments[0]", before)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_phone_in_both_themes(room: Room, dark: bool) -> None:
    room.window.look(dark=dark, width=360, height=740)
    room.window.wait("window.innerWidth == 360")
    assert room.window.run("return document.documentElement.scrollWidth") == 360
    ground = room.window.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 3 * 128) is dark
    room.window.look(dark=dark, width=1200, height=900)

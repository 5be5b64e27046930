"""Chromium without a screen, on a node, driven through chromedriver (https://www.w3.org/TR/webdriver2/)."""

import base64
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.core.namespaces import Namespace
from tests.patience import PATIENCE
from tests.rights import program

_PORT = 9515
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
              "--hide-scrollbars", "--no-first-run", "--disable-background-networking")


class Browser:
    """One window."""

    def __init__(self, node: Namespace) -> None:
        self._node = node
        self._session = ""

    def start(self, profile: Path) -> None:
        """Open a window. Raises OSError while chromedriver does not listen yet."""
        options = {"args": [*_ARGUMENTS, f"--user-data-dir={profile}"], "binary": "/usr/bin/chromium"}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options,
                  "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def end(self) -> None:
        if self._session:
            self._ask("DELETE", self._session)

    def open(self, address: str) -> None:
        self._command("url", url=address)

    def run(self, script: str, *arguments: object) -> Any:
        """Return the value of the body of a function."""
        return self._command("execute/sync", script=script, args=list(arguments))

    def wait(self, script: str, *arguments: object, seconds: float = PATIENCE) -> Any:
        """Return the value of an expression once it is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(f"return {script}", *arguments)):
            assert time.monotonic() < deadline, f"never true: {script}\n{self.text}\n{self.complaints()}"
            time.sleep(0.05)
        return found

    def type(self, selector: str, keys: str) -> None:
        """Press *keys* while the element has the focus."""
        found = self._command("element", using="css selector", value=selector)
        self._command(f"element/{found[_ELEMENT]}/value", text=keys)

    def press(self, keys: str) -> None:
        """Press and release *keys*, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._command("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    @property
    def text(self) -> str:
        """All text that the page shows."""
        return str(self.run("return document.body.innerText"))

    def complaints(self) -> list[str]:
        """Return the lines of the console since the last call: errors, and refusals by the page's policy."""
        return [line["message"] for line in self._command("se/log", type="browser")]

    def look(self, *, dark: bool, width: int, height: int) -> None:
        """Emulate a theme and a screen."""
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", features=[theme])
        self._devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                       mobile=width < 600)

    def picture(self) -> bytes:
        """Return a picture of the window as WebP."""
        found = self._devtools("Page.captureScreenshot", format="webp", quality=80)
        return base64.b64decode(found["data"])

    def _devtools(self, command: str, **parameters: object) -> Any:
        return self._command("goog/cdp/execute", cmd=command, params=parameters)

    def _command(self, path: str, **content: object) -> Any:
        return self._ask("POST", f"{self._session}/{path}", content)

    def _ask(self, method: str, path: str, content: object = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=PATIENCE)
        connection.sock = self._node.inside(lambda: socket.create_connection(("127.0.0.1", _PORT), PATIENCE))
        try:
            connection.request(method, path, json.dumps(content) if content is not None else None)
            value = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        assert not (isinstance(value, dict) and "error" in value), value
        return value


@contextmanager
def browser(node: Namespace, directory: Path) -> Iterator[Browser]:
    """Yield a browser on *node*, which keeps its files in *directory*."""
    program("chromedriver")
    driver = subprocess.Popen(
        ["ip", "netns", "exec", node.name, "chromedriver", f"--port={_PORT}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={"HOME": str(directory), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )  # fmt: skip
    made = Browser(node)
    try:
        _until_it_listens(lambda: made.start(directory / "profile"))
        yield made
    finally:
        made.end()
        driver.terminate()
        driver.wait()


def _until_it_listens(start: Callable[[], None]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            start()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "chromedriver does not listen"
            time.sleep(0.05)
        else:
            return

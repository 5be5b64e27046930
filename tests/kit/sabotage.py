"""Sabotages of the example backend: plugins without a mode that wrap or replace hooks and methods."""

import subprocess
from collections.abc import Generator
from typing import Any

from kproxy_core.contract import Backend, hookimpl


def nft(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text, text=True, capture_output=True, check=False)


class Sabotage:
    """One sabotage, and the words of the check that must notice it."""

    check = ""
    words = ""

    def __str__(self) -> str:
        return type(self).__name__

    def be_loaded(self) -> None:
        """Act when the plugin is imported."""

    @hookimpl(wrapper=True)
    def kproxy_make_backend(self) -> Generator[None, Backend, Backend]:
        made = yield
        self.spoil(made)
        return made

    def spoil(self, backend: Any) -> None:
        """Replace methods of a new backend."""

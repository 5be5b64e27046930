"""Sabotages of the example backend: plugins without a mode that wrap or replace hooks."""

import subprocess


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

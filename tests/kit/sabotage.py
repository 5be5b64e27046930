"""What a sabotage of the example backend is: a plugin without a mode that wraps or forestalls hooks."""

import subprocess


def nft(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text, text=True, capture_output=True, check=False)


class Sabotage:
    """What is done, and the words with which a check must notice."""

    check = ""
    words = ""

    def __str__(self) -> str:
        return type(self).__name__

    def be_loaded(self) -> None:
        """What happens when the plugin is imported."""

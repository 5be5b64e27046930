"""Guests from Python: `run` beside this file, as a process of its own."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

RUN = Path(__file__).with_name("run")

_GRACE = 20
"""Seconds that the script has to end its guest and to tidy up."""


class Guest:
    """A command in a guest, under way. Ends with the context, however that is left."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        *,
        share: Path,
        seconds: int,
        environment: Mapping[str, str] = {},
    ) -> None:
        """*log* gets the output, *share* is what the guest may write to, *seconds* its longest life.

        *environment* is added to that of the guest and of `run`.
        """
        self.log = log
        own = {"GUEST_SHARE": str(share), "GUEST_SECONDS": str(seconds)}
        with log.open("wb") as output:
            # A guest keeps one processor busy, and its own clock waits for it.
            self._process = subprocess.Popen(
                ["nice", "-n", "5", RUN, *command],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **own, **environment},
            )  # fmt: skip

    def __enter__(self) -> "Guest":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def status(self) -> int:
        """The exit status of the command, once it has ended."""
        return self._process.wait()

    @property
    def output(self) -> str:
        """The output so far."""
        return self.log.read_text(errors="replace")

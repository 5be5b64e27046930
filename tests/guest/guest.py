"""Guests from Python: `run` beside this file, as a process of its own."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

RUN = Path(__file__).with_name("run")

_MODULES = (
    *("nft_chain_nat", "nft_compat", "nft_ct", "nft_masq", "nft_nat", "nft_numgen", "nft_redir"),
    *("nft_fib_inet", "nft_fib_ipv4", "nft_fib_ipv6", "nft_reject_ipv4", "nft_reject_ipv6"),
    *("xt_addrtype", "xt_comment", "xt_conntrack", "xt_mark", "xt_MASQUERADE", "xt_nat", "xt_REDIRECT"),
    *("xt_statistic", "xt_tcpudp", "ipt_REJECT", "ip6t_REJECT", "bridge", "veth"),
    # Loading it is what shows bridged packets to iptables, as on a node set up by kubeadm.
    "br_netfilter",
)
LONGEST = 3000
"""Seconds that a guest lives: ten times what the longest takes on a quiet machine. Waits in it end sooner."""
_GRACE = 20
"""Seconds for the script to end its guest and clean up."""


class Guest:
    """A command that runs in a guest. Leaving the context ends the guest."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        *,
        share: Path,
        seconds: int = LONGEST,
        environment: Mapping[str, str] = {},
    ) -> None:
        """Start a guest that lives *seconds* at most, writes its output to *log*, and may change *share*.

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
        """Wait for the command to end and return its exit status."""
        return self._process.wait()

    @property
    def output(self) -> str:
        """The output so far."""
        return self.log.read_text(errors="replace")


def with_nft(command: Sequence[str | Path]) -> list[str | Path]:
    """Return *command*, run once the modules of nf_tables, matches and targets are loaded.

    The kernel loads them by itself, but begins a transaction of nf_tables again for each: the first rules
    take a hundred runs of modprobe.
    """
    return ["sh", "-c", f'modprobe -qa {" ".join(_MODULES)}; exec "$@"', "sh", *command]

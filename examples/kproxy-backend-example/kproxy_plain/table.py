"""The tables in the kernel, through nft(8): all input and output of this backend."""

import signal
import subprocess
from collections.abc import Iterable

from kproxy_core.contract import Family, Leftovers, NodeView, SyncFailed
from kproxy_plain.rules import NFT_FAMILY, TABLE, Rules, base_rules, commands, parse_table, table_text


def read_table(family: Family) -> Rules | None:
    """Return the kernel's rules; None without a table. Raises SyncFailed."""
    name = f"table {NFT_FAMILY[family]} {TABLE}"
    if name not in _nft("list", "tables").splitlines():
        return None
    return parse_table(_nft("--stateless", "list", *name.split()))


def write_table(family: Family, old: Rules | None, new: Rules) -> None:
    """Replace *old*, None without a table, by *new* in one transaction. Raises SyncFailed."""
    text = table_text(family, new) if old is None else commands(family, old, new)
    if text:
        _nft("-f", "-", stdin=text)


def try_rules(families: Iterable[Family]) -> str:
    """Return why nft rejects the constant rules; "" if it accepts them. Changes nothing."""
    try:
        for family in families:
            rules = base_rules(NodeView(family=family, name=""), 0)
            _nft("--check", "-f", "-", stdin=table_text(family, rules))
    except SyncFailed as error:
        return str(error)
    return ""


def delete_tables(dry_run: bool) -> Leftovers:
    """Delete the tables of both families, or with *dry_run* only list them."""
    removed: list[str] = []
    errors: list[str] = []
    try:
        present = _nft("list", "tables").splitlines()
        for ip in NFT_FAMILY.values():
            name = f"table {ip} {TABLE}"
            if name in present:
                if not dry_run:
                    _nft("delete", *name.split())
                removed.append(name)
    except SyncFailed as error:
        errors.append(str(error))
    return Leftovers(tuple(removed), tuple(errors))


def _nft(*arguments: str, stdin: str = "") -> str:
    """Return the output of nft. Raises SyncFailed with the first line of its error.

    A set that a newer nft made, in any table, may crash it.
    """
    try:
        done = subprocess.run(["nft", *arguments], input=stdin, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SyncFailed(f"can't run nft: {error.strerror}") from error
    if done.returncode < 0:
        raise SyncFailed(f"nft: ended by signal {-done.returncode} ({signal.strsignal(-done.returncode)})")
    if done.returncode:
        raise SyncFailed(f"nft: {done.stderr.strip().partition(chr(10))[0]}")
    return done.stdout

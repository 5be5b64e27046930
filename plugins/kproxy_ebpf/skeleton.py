"""The rules that exempt marked packets from connection tracking, as nft text. Pure."""

from kproxy_core.model.address import Family
from kproxy_ebpf.names import NOTRACK_TABLE


def notrack_rules(family: Family, mark: int) -> str:
    """Return the commands that create the table of *family*, or replace it in the same transaction.

    Replies have no mark: they are recognised by their socket's. Connections within the node are tracked,
    because neither holds for replies of a server of the node itself.
    """
    table = f"{family.ip} {NOTRACK_TABLE}"
    lines = [f"add table {table}", f"delete table {table}", f"add table {table}"]
    for hook, match in (("output", 'oif != "lo" meta'), ("prerouting", 'iif != "lo" socket')):
        place = f"type filter hook {hook} priority -300; policy accept;"
        lines += [f"add chain {table} {hook} {{ {place} }}",
                  f"add rule {table} {hook} meta l4proto tcp {match} mark {mark:#010x} notrack"]
    return "".join(f"{line}\n" for line in lines)

"""Portals of one family as text, whole or as a start of the process would open them."""

from kproxy_core.contract import Preview, Update
from kproxy_core.nft.messages import commands_text
from kproxy_userspace.batch import iptables_rewrite, nft_creation
from kproxy_userspace.kernel.portals import find_tables
from kproxy_userspace.settings import Settings
from kproxy_userspace.skeleton import JUMPS
from kproxy_userspace.wanted import Redirect, wanted


def render_text(update: Update, settings: Settings) -> str:
    """Return the portals of a resync in an empty kernel, as input for nft or iptables-restore.

    Relays have no ports yet, so theirs is 0. Raises HostError.
    """
    if settings.listen is not None:
        return ""
    at = settings.bind_in(update.family)
    redirects = [
        Redirect(portal, 0, at)
        for plan in update.plans.values()
        for relay in wanted(plan, update.node, None).values()
        for portal in relay.portals
    ]
    if find_tables(update.family) is None:
        return commands_text(nft_creation(update.family, redirects, at))
    return iptables_rewrite(redirects, JUMPS)


def complaint_about(update: Update, settings: Settings) -> str | None:
    """Return libnftables' complaint about the text; None for iptables-restore. Raises HostError."""
    if settings.listen is None and find_tables(update.family) is not None:
        return None
    from kproxy_core.linux.libnftables import complaint

    return complaint(render_text(update, settings))


def preview(update: Update, settings: Settings) -> Preview:
    """Return the operations of a start, with the text of `render_text`."""
    relays = [
        relay for plan in update.plans.values()
        for relay in wanted(plan, update.node, settings.listen, counted=settings.counts_connections).values()
    ]
    return Preview(len(relays) + sum(len(relay.portals) for relay in relays), render_text(update, settings))

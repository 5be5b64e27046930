"""Serves the hooks `kproxy_render` and `kproxy_check_text`: all portals of one family, for people to read."""

from kproxy_core.backend.api import Update
from kproxy_core.host.nftables.objects import commands_text
from kproxy_userspace.batch import iptables_rewrite, nft_completion
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
        return commands_text(nft_completion(update.family, redirects, at))
    return iptables_rewrite(redirects, JUMPS)


def complaint_about(update: Update, settings: Settings) -> str | None:
    """Return libnftables' complaint about the text; None for iptables-restore. Raises HostError."""
    if settings.listen is None and find_tables(update.family) is not None:
        return None
    from kproxy_core.host.libnftables.texts import complaint

    return complaint(render_text(update, settings))

"""The hook `kproxy_render`: all portals of one family, for people to read."""

from kproxy_core.backend.api import Update
from kproxy_core.model.address import Address
from kproxy_userspace.batch import iptables_rewrite, nft_rewrite
from kproxy_userspace.skeleton import JUMPS
from kproxy_userspace.wanted import Redirect, wanted


def render_text(update: Update, *, at: Address | None, by_nft: bool) -> str:
    """Return the portals of a resync in an empty kernel, to relays *at* an address, None: at every one.

    The text is input for nft or iptables-restore. Relays have no ports yet, so theirs is 0.
    """
    redirects = [
        Redirect(portal, 0, at)
        for plan in update.plans.values()
        for relay in wanted(plan, update.node, None).values()
        for portal in relay.portals
    ]
    return nft_rewrite(update.family, redirects, at) if by_nft else iptables_rewrite(redirects, JUMPS)

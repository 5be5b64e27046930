"""Serves the hook `kproxy_preview`: the relays and portals that a process opens when it starts."""

from kproxy_core.backend.api import Preview, Update
from kproxy_userspace.inspection.render import render_text
from kproxy_userspace.settings import Settings
from kproxy_userspace.wanted import wanted


def preview(update: Update, settings: Settings) -> Preview:
    """Return the operations of a start, with the text of `render_text`."""
    relays = [
        relay for plan in update.plans.values()
        for relay in wanted(plan, update.node, settings.listen, counted=settings.counts_connections).values()
    ]
    return Preview(len(relays) + sum(len(relay.portals) for relay in relays), render_text(update, settings))

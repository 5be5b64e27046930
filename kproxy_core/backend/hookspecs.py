"""The hooks of a kproxy backend.

Questions (`kproxy_describe`, `kproxy_detect`, `kproxy_cleanup`) go to every
plugin. Work goes to one: `kproxy_make_backend` returns an instance, which is
registered and alone implements the remaining hooks. Observers may wrap any of
them (``@hookimpl(wrapper=True)``). An implementation may leave out arguments
that it does not use.
"""

from collections.abc import Sequence

import pluggy

from kproxy_core.backend.api import (
    Backend,
    BackendSettings,
    Caveat,
    Damage,
    Description,
    Detection,
    Leftovers,
    Measurement,
    SyncReport,
    Trial,
    Update,
)
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey

PROJECT = "kproxy"
ENTRY_POINTS = "kproxy.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kproxy_describe() -> Description:
    """Say which mode this plugin provides. Must not import anything heavy or touch the kernel."""
    raise NotImplementedError


@hookspec
def kproxy_detect(settings: BackendSettings, trial: Trial | None, load_modules: bool) -> Detection:
    """Say whether the mode works on this kernel; name each requirement and its remedy.

    Changes nothing. Never raises for something that is missing. With a *trial* this is a process made for
    the question: what the mode needs is to be tried in `Trial.enter`'s namespace. Without one, what can't
    be known by looking is concluded, and `Requirement.guessed`. Kernels load modules for whoever asks for
    what they do: without *load_modules* nothing may be tried that would have that effect.
    """
    raise NotImplementedError


@hookspec
def kproxy_cleanup(settings: BackendSettings, dry_run: bool, own_only: bool) -> Leftovers:
    """Remove every trace that this mode leaves in the kernel, and nothing else.

    Idempotent; covers what kube-proxy leaves in the same mode, but with *own_only* leaves whatever a
    running kube-proxy of any mode may be using. What cannot be removed is reported in
    `Leftovers.errors`, not raised.
    """
    raise NotImplementedError


@hookspec
def kproxy_retire(settings: BackendSettings) -> Leftovers:
    """Another mode serves now: remove what no established connection needs, and take no new ones.

    Optional, for plugins whose traces carry connections, and for backends that carry them in their own
    process. Called every few seconds while anything is `Leftovers.waiting`; `kproxy_close` and
    `kproxy_cleanup` follow. Errors as in `kproxy_cleanup`.
    """
    raise NotImplementedError


@hookspec
def kproxy_caveats(update: Update, settings: BackendSettings) -> Sequence[Caveat]:
    """What of *update* this mode does differently from others, or not at all.

    Optional. Pure: asks the values alone, never the kernel.
    """
    raise NotImplementedError


@hookspec
def kproxy_supersede(dry_run: bool) -> Leftovers:
    """Remove what kube-proxy left in the same mode, where it is nothing that this mode uses itself.

    Optional. Called once, when this mode serves, and before it serves again while it is still retiring; may
    run beside syncs. Errors as in `kproxy_cleanup`.
    """
    raise NotImplementedError


@hookspec
def kproxy_prepare(settings: BackendSettings) -> None:
    """Set what the mode needs of the whole machine, such as sysctls, and serving must not need to set again.

    Optional. Called for ``--init-only``, with all privileges; the rules are left alone.
    Raises SyncFailed.
    """


@hookspec(firstresult=True)
def kproxy_make_backend(mode: str, settings: BackendSettings) -> Backend | None:
    """Make the backend if *mode* is this plugin's, else return None. The kernel is left alone.

    Raises Unsupported if it can't work here.
    """


@hookspec(firstresult=True)
def kproxy_begin() -> bool:
    """Find out, before anything depends on it, whether the mode can work; what was found out may be kept.

    Optional; without it `kproxy_detect` is asked. Called once when this backend is to serve, and to be
    answered in milliseconds. May set what serving needs of the machine. True if it can; raises
    Unsupported if not, whereupon another mode may be taken, or SyncFailed for what may pass.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_sync(update: Update) -> SyncReport:
    """Make the kernel agree with *update*; on return it does.

    Called from one thread, once per family and batch. A failed call has remembered nothing.
    Raises SyncFailed, or TrustLost to be called again with `Scope.RESYNC`.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_relays(family: Family, key: ServicePortKey) -> frozenset[int]:
    """The ports of this node where this process itself takes what is sent to a service port, and answers it.

    Optional, for modes that relay. UDP flows that lead to one are not stale when endpoints go: who relays
    knows of that, and an answer may be under way. Asked after each sync that changed the service port.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_render(update: Update) -> str:
    """The complete rules that *update* asks for, as text in the mechanism's own language.

    Touches no kernel and needs no privileges.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_watch(damaged: Damage) -> bool:
    """Begin telling *damaged* about changes by others to what this backend programmed.

    Called once, after the first successful sync. True if they will be noticed, False if this
    backend can't tell, so that periodic full syncs have to do.
    """
    raise NotImplementedError


@hookspec
def kproxy_measure() -> Sequence[Measurement]:
    """What is worth a metric besides what the core counts. Optional.

    Called at each scrape, from another thread than the rest. Must not raise.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_close() -> None:
    """Release sockets and threads; leave the kernel as it is.

    Only rules that lead into this process go: what they lead to is nobody's then, or anybody's.
    """

"""The hooks of kproxy: questions that every plugin answers about its mode.

Each is put to one plugin at a time, and observers may wrap all but `kproxy_describe`
(``@hookimpl(wrapper=True)``). Work belongs to the `Backend` that `kproxy_make_backend` returns; of that, only
a sync is a hook as well. An implementation may leave out arguments that it does not use.
"""

from collections.abc import Sequence

import pluggy

from kproxy_core.contract import values
from kproxy_core.contract.backend import Backend
from kproxy_core.model.address import Protocol
from kproxy_core.model.service import Destination

PROJECT = "kproxy"
ENTRY_POINTS = "kproxy.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kproxy_describe() -> values.Description:
    """Describe the mode that this plugin provides. Import nothing heavy and leave the kernel alone."""
    raise NotImplementedError


@hookspec
def kproxy_detect(
    settings: values.BackendSettings, trial: values.Trial | None, load_modules: bool
) -> values.Detection:
    """Report whether the mode works on this kernel, with each requirement and its remedy.

    Optional; without it, the mode has no requirements. Changes nothing, and never raises because something is
    missing. With a *trial*, this process exists for the question only: enter its namespace (`Trial.enter`)
    and try what the mode needs. Without one, draw conclusions from what can be read, and mark them as
    `Requirement.guessed`. Kernels load modules for processes that use their features: without
    *load_modules*, try nothing that has this effect. Raises InvalidOption as `kproxy_make_backend` does.
    """
    raise NotImplementedError


@hookspec
def kproxy_cleanup(settings: values.BackendSettings, dry_run: bool, own_only: bool) -> values.Leftovers:
    """Remove every trace of this mode from the kernel, and nothing else.

    Idempotent. Covers kube-proxy's traces of the same mode, too, but with *own_only* leaves everything that a
    running kube-proxy of any mode may use. Report failures in `Leftovers.errors` instead of raising them.
    """
    raise NotImplementedError


@hookspec
def kproxy_retire(settings: values.BackendSettings) -> values.Leftovers:
    """Remove what no established connection needs, and accept no new connections: another mode serves now.

    Optional, for plugins whose rules carry established connections. Called every few seconds while
    `Leftovers.is_needed`; `Backend.close` and `kproxy_cleanup` follow. Errors as in the latter.
    """
    raise NotImplementedError


@hookspec
def kproxy_caveats(update: values.Update, settings: values.BackendSettings) -> Sequence[values.Caveat]:
    """Return everything in *update* that this mode does differently from other modes, or not at all.

    Optional. Pure: decides from the arguments alone, never from the kernel.
    """
    raise NotImplementedError


@hookspec
def kproxy_supersede(dry_run: bool) -> values.Leftovers:
    """Remove kube-proxy's leftovers of the same mode that this mode does not use itself.

    Optional. Called once when this mode serves, and again if it is to serve while it is still retiring. May
    run concurrently with syncs. Errors as in `kproxy_cleanup`.
    """
    raise NotImplementedError


@hookspec
def kproxy_prepare(settings: values.BackendSettings) -> None:
    """Make the settings of the whole machine that the mode needs, such as sysctls, so that serving need not.

    Optional. Called for ``--init-only``, with all privileges, for the mode that will serve and for every
    usable mode to which the proxy may be switched. Leaves rules alone. Raises SyncFailed.
    """


@hookspec
def kproxy_dialled(protocol: Protocol, source: Destination, endpoint: Destination) -> Destination | None:
    """Return the frontend that the socket at *source* dialled; None if that is not known.

    Optional, for modes that send sockets to an *endpoint* before their first packet; serves ``kproxy trace``.
    Called while the connection is new, in another process than the one that serves. Raises HostError.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_make_backend(
    mode: str, settings: values.BackendSettings, base: Backend | None
) -> Backend | None:
    """Return a new backend of *mode*, the plugin's own. Leave the kernel alone.

    *base* is a new backend of `Description.base`, None without one. Raises Unsupported if the mode cannot
    work here, and another may be chosen; raises InvalidOption if one of `BackendSettings.options` has a wrong
    value, which ends the start.
    """


@hookspec(firstresult=True)
def kproxy_sync(backend: Backend, update: values.Update) -> values.SyncReport:
    """Have *backend* make the kernel agree with *update*.

    For observers to wrap or to forestall: the core's own implementation, the last, calls `Backend.sync`.
    """
    raise NotImplementedError


@hookspec
def kproxy_measure() -> Sequence[values.Measurement]:
    """Return metrics of an observer. Optional; see `Backend.measure`."""
    raise NotImplementedError

"""The hooks of a kproxy backend.

Every plugin answers questions: `kproxy_describe`, `kproxy_detect`, `kproxy_cleanup` and the optional ones.
Work belongs to one plugin: its `kproxy_make_backend` returns an instance, which is registered and alone
implements the remaining hooks. Observers may wrap any hook (``@hookimpl(wrapper=True)``). An implementation
may leave out arguments that it does not use.
"""

from collections.abc import Sequence

import pluggy

from kproxy_core.contract import values
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.plan.service_plan import Frontend

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

    Changes nothing, and never raises because something is missing. With a *trial*, this process exists for
    the question only: enter its namespace (`Trial.enter`) and try what the mode needs. Without one, draw
    conclusions from what can be read, and mark them as `Requirement.guessed`. Kernels load modules for
    processes that use their features: without *load_modules*, try nothing that has this effect. Raises
    InvalidOption as `kproxy_make_backend` does.
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

    Optional, for plugins whose rules carry established connections, and for backends that relay connections
    in their own process. Called every few seconds while `Leftovers.is_needed`; `kproxy_close` and
    `kproxy_cleanup` follow. Errors as in `kproxy_cleanup`.
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
def kproxy_make_backend(mode: str, settings: values.BackendSettings) -> values.Backend | None:
    """Return a new backend if *mode* is this plugin's, else None. Leave the kernel alone.

    Raises Unsupported if the mode cannot work here, and another may be chosen; raises InvalidOption if one of
    `BackendSettings.options` has a wrong value, which ends the start.
    """


@hookspec(firstresult=True)
def kproxy_begin() -> bool:
    """Check that the mode can work, before anything depends on it. May keep what it finds out.

    Optional; without it, `kproxy_detect` decides. Called once before this backend serves, and must answer
    within milliseconds. May make settings of the machine that serving needs. Return True if the mode can
    work. Raises Unsupported if it cannot, and another mode may be chosen; raises SyncFailed for a problem
    that may pass.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_sync(update: values.Update) -> values.SyncReport:
    """Make the kernel agree with *update*; on return it does.

    Called from one thread, once per family and batch. A failed call has remembered nothing. Raises
    SyncFailed, or TrustLost to be called again with `Scope.RESYNC`.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_relays(family: Family, key: ServicePortKey) -> frozenset[int]:
    """Return the ports of this node on which this process itself relays traffic of a service port.

    Optional, for modes that relay. UDP flows to these ports are not stale when endpoints disappear, because
    the relay learns of that and an answer may be under way. Called after each sync that changed the service
    port.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_render(update: values.Update) -> str:
    """Return the complete rules for *update* as the mechanism's text. Needs no kernel and no privileges."""
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_check_text(update: values.Update) -> str | None:
    """Return the complaint of the mechanism's own program about the text that `kproxy_render` returns.

    Optional; serves ``kproxy render --check``. Return "" if the program takes the text, None if it has no way
    to check that. Applies nothing, and depends on nothing that the kernel holds. Raises BackendError or
    HostError.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_preview(update: values.Update) -> values.Preview:
    """Return the operations with which a `Scope.RESYNC` would bring the kernel to *update* now.

    Optional; serves ``kproxy plan`` and ``kproxy switch --check``. Reads the kernel and changes nothing.
    Called as `kproxy_explain`, also where another mode serves. Raises BackendError or HostError.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_explain(questions: Sequence[values.Question], live: bool) -> Sequence[values.KernelSide]:
    """Return the kernel objects that each packet meets, and the fate that these give it.

    Optional. With *live*, read them from the kernel now; without it, return those that a sync would write,
    which needs no privileges. Changes nothing. Called from a different thread than the other hooks, while
    syncs run: use sockets of its own. All questions are about one family. Raises BackendError or HostError.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_frontends(family: Family) -> Sequence[Frontend]:
    """Return the frontends that the kernel's objects of this mode serve now, wanted or not.

    Optional; serves ``kproxy diff``. Called as `kproxy_explain`. Raises BackendError or HostError.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_traffic(family: Family) -> Sequence[values.Connections]:
    """Return the new connections of each frontend and endpoint, as counted since each count began.

    Optional; called only with `BackendSettings.count_traffic`. A sync that replaces an endpoint keeps its
    count. Numbers that are 0 may be left out, and refusals where the mode cannot count them. A count may end
    90 minutes after its last connection: after an hour, that of an hourly client would begin again at the
    same number. Called as `kproxy_explain`. Raises BackendError or HostError.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_watch(damaged: values.Damage) -> bool:
    """Start calling *damaged* whenever another process changes what this backend programmed.

    Called once, after the first successful sync. Return True if changes will be noticed; False if they cannot
    be, so that the core must look for them in periodic full syncs.
    """
    raise NotImplementedError


@hookspec
def kproxy_measure() -> Sequence[values.Measurement]:
    """Return values worth a metric that the core does not count itself. Optional.

    Called at each scrape, from a different thread than the other hooks. Must not raise.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kproxy_close() -> None:
    """Release sockets and threads; leave the kernel as it is.

    Delete only rules that redirect to this process: after it exits, another process may own those ports.
    """

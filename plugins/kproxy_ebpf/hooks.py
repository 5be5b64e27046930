"""The plugin: kproxy's questions, answered without importing anything heavy."""

from collections.abc import Sequence

from kproxy_core.contract import (
    Backend,
    BackendSettings,
    Caveat,
    Description,
    Destination,
    Detection,
    Leftovers,
    Protocol,
    Trial,
    Update,
    hookimpl,
)
from kproxy_ebpf.names import MODE


@hookimpl
def kproxy_describe() -> Description:
    return Description(
        mode=MODE,
        summary="endpoints chosen at connect() by BPF programs, in front of the nftables rules",
        contract=(1, 1),
        preference=5,
        default_node_port_addresses=("primary",),
        fallback="nftables",
        base="nftables",
        options=("cgroup", "clients", "pinDirectory", "getpeername", "connectedUdp"),
    )


@hookimpl
def kproxy_detect(settings: BackendSettings, trial: Trial | None) -> Detection:
    from kproxy_ebpf.detect import detect

    return detect(settings, trial)


@hookimpl
def kproxy_cleanup(settings: BackendSettings, dry_run: bool) -> Leftovers:
    """Detach the programs and remove their pins."""
    from kproxy_ebpf.cleanup import cleanup

    return cleanup(settings, dry_run=dry_run)


@hookimpl
def kproxy_retire(settings: BackendSettings) -> Leftovers:
    """Stop choosing endpoints; remove the rest once late replies have arrived."""
    from kproxy_ebpf.cleanup import retire

    return retire(settings)


@hookimpl
def kproxy_prepare(settings: BackendSettings) -> None:
    """Mount the BPF file system where it is not mounted."""
    from kproxy_ebpf.kernel.maps import prepare
    from kproxy_ebpf.settings import read_settings

    prepare(read_settings(settings))


@hookimpl
def kproxy_caveats(update: Update, settings: BackendSettings) -> Sequence[Caveat]:
    from kproxy_ebpf.detect import caveats
    from kproxy_ebpf.settings import read_settings

    return tuple(caveats(update, read_settings(settings)))


@hookimpl
def kproxy_dialled(protocol: Protocol, source: Destination, endpoint: Destination) -> Destination | None:
    """Return what a TCP socket remembers: the kernel does not tell it of others."""
    from kproxy_ebpf.explain import dialled

    return dialled(source, endpoint) if protocol is Protocol.TCP else None


@hookimpl
def kproxy_make_backend(settings: BackendSettings, base: Backend) -> Backend:
    from kproxy_ebpf.backend import EbpfBackend

    return EbpfBackend(base, settings)

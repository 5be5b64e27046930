"""``kproxy plan``."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kproxy_core.app.control import NoProxy, send_request
from kproxy_core.app.explain import NoAnswer
from kproxy_core.cli.terminal import bad, faint, good, hint
from kproxy_core.config.flags import Flags

Found = Mapping[str, Any]

_STYLES = {"gained": good, "lost": bad, "changed": hint}


def with_objects(where: str, flags: Flags) -> Flags:
    """Return *flags* with the objects at *where*: a directory of manifests, or a kubeconfig file."""
    if not where:
        return flags
    return Flags(flags, **{"manifests" if Path(where).is_dir() else "kubeconfig": where})


def plan(flags: Flags, *, verbose: bool) -> Found:
    """Return the changes that the objects in *flags* would make; transactions only if *verbose*.

    Services are compared with those of the running proxy; without one, with what the kernel serves. Raises
    NoAnswer or RequestRefused, and as `cli_errors` expects.
    """
    from kproxy_core.app.answers import changes_from_kernel, documents, operations
    from kproxy_core.app.explain import changes
    from kproxy_core.cli.objects import read_objects
    from kproxy_core.contract.values import Scope
    from kproxy_core.linux import process

    if "CAP_NET_ADMIN" not in process.held():
        raise NoAnswer("CAP_NET_ADMIN is missing: the operations follow from what the kernel holds now")
    try:
        running = send_request({"do": "plans"})
    except NoProxy:
        running = None
    if running is not None and not {"mode", "config"} & set(flags):
        flags = Flags(flags, mode=running["mode"])
    with read_objects(flags, this_machine=True) as (plans, _, instance, *_):
        services = changes_from_kernel(plans, instance) if running is None else [
            *changes(running["plans"], documents(plans))]
        updates = [of_family.update(Scope.RESYNC) for of_family in plans.values()]
        return {
            "mode": instance.mode, "serving": running["mode"] if running is not None else "",
            "services": services, "kernel": [
                {key: family[key] for key in family if verbose or key != "transaction"}
                for family in operations(instance, updates)],
        }  # fmt: skip


def as_text(found: Found) -> str:
    transactions = [family.get("transaction", "").rstrip("\n") for family in found["kernel"]]
    return "\n".join([*_services(found), *kernel_lines(found["mode"], found["kernel"]),
                      *map(faint, filter(None, transactions))])  # fmt: skip


def kernel_lines(mode: str, kernel: list[Mapping[str, Any]]) -> Iterator[str]:
    if not kernel:
        yield f"mode {mode} cannot say what it would write"
    for family in kernel:
        count = family["operations"]
        text = f"{count} operation{'' if count == 1 else 's'}" if count else good("nothing to write")
        yield f"{mode}, {family['family']}: {text}"


def _services(found: Found) -> Iterator[str]:
    beside = f"the running proxy ({found['serving']})" if found["serving"] else "what the kernel serves"
    if not found["services"]:
        yield good(f"the same Services as {beside}")
        return
    counts = Counter(change["change"] for change in found["services"])
    yield f"service ports beside {beside}: " + ", ".join(
        f"{counts[kind]} {kind}" for kind in _STYLES if counts[kind])
    for change in found["services"]:
        of = f" {change['service_port']}/{change['protocol']} {change['family']}" * bool(change["family"])
        yield f"{_STYLES[change['change']](change['change'])}{of}: {'; '.join(change['details'])}"

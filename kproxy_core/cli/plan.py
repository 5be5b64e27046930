"""``kproxy plan``: what would change if other objects or another mode were served."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from kproxy_core.app.control import send_request
from kproxy_core.app.errors import NoAnswer, NoProxy
from kproxy_core.app.requests import Plans
from kproxy_core.cli.options import OBJECTS, OUTPUT, FlagCommand, given, with_flags
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.terminal import bad, faint, good, hint, show_answer
from kproxy_core.config.flags import RULES, SOURCES, Flags

Found = Mapping[str, Any]

_STYLES = {"gained": good, "lost": bad, "changed": hint}


def with_objects(where: str, flags: Flags) -> Flags:
    """Return *flags* with *where*, the path of a directory of manifests or of a kubeconfig file."""
    if not where:
        return flags
    return Flags(flags, **{"manifests" if Path(where).is_dir() else "kubeconfig": where})


def plan(flags: Flags, *, verbose: bool) -> Found:
    """Return the changes that the objects of *flags* would make, with transactions only if *verbose*.

    Services are compared with those of the running proxy; without one, with what the kernel serves. Raises
    NoAnswer or RequestRefused, and as `cli_errors` expects.
    """
    from kproxy_core.app.answers import changes_from_kernel, documents, operations
    from kproxy_core.app.changes import changes
    from kproxy_core.cli.objects import read_objects
    from kproxy_core.contract.values import Scope
    from kproxy_core.linux import process
    from kproxy_core.model.address import format_address
    from kproxy_core.plan.removals import removals

    if "CAP_NET_ADMIN" not in process.network_privileges():
        raise NoAnswer("CAP_NET_ADMIN is missing: it is needed to read what the kernel holds now")
    try:
        running = send_request(Plans())
    except NoProxy:
        running = None
    if running is not None and not {"mode", "config"} & set(flags):
        flags = Flags(flags, mode=running["mode"])
    with read_objects(flags, this_machine=True) as (plans, _, instance, *_):
        services = changes_from_kernel(plans, instance) if running is None else [
            *changes(running["plans"], documents(plans))]
        ending = [
            {"service": str(removal.service), **removal.field._asdict(),
             "addresses": [*map(format_address, removal.addresses)]}
            for removal in removals(each for of_family in plans.values() for each in of_family.plans.values())
        ]
        updates = [of_family.update(Scope.RESYNC) for of_family in plans.values()]
        return {
            "mode": instance.mode, "serving": running["mode"] if running is not None else "",
            "services": services, "ending": ending, "kernel": [
                {key: family[key] for key in family if verbose or key != "transaction"}
                for family in operations(instance, updates)],
        }  # fmt: skip


def as_text(found: Found) -> str:
    transactions = [family.get("transaction", "").rstrip("\n") for family in found["kernel"]]
    return "\n".join([*_services(found), *_ending(found), *kernel_lines(found["mode"], found["kernel"]),
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


def _ending(found: Found) -> Iterator[str]:
    """Yield the Services that kube-proxy will stop serving at some addresses, under a line for each field."""
    fields = {each["path"]: each for each in found["ending"]}
    for path, field in fields.items():
        yield (f"{path} is deprecated: kube-proxy {field['off_by_default']} will not serve it by default, "
               f"{field['removed']} not at all; kproxy does while the feature gate {field['gate']} is on")
        for each in found["ending"]:
            if each["path"] == path:
                yield f"{hint('ending')} {each['service']}: {', '.join(each['addresses'])}"


@click.command("plan", cls=FlagCommand)
@click.argument("objects", metavar="[DIR|KUBECONFIG]", default="")
@click.option("-v", "--verbose", is_flag=True,
              help="Also print the transactions that would be written, and log the steps.")
@with_flags(RULES, SOURCES)
@OUTPUT
def command(objects: str, verbose: bool, output: str, **options: Any) -> None:
    """Show what would change on this node if other objects were served.

    Nothing is written. The objects are the manifests in DIR, or those of the API server that KUBECONFIG
    names. They are compared with the Services of the running proxy, or without one, with what the kernel
    serves. With --mode, they would be served in that mode.
    """
    flags = with_objects(objects, given(options))
    if verbose:
        flags = Flags(flags, v="1")
    if not OBJECTS & set(flags):
        raise click.UsageError("give DIR, KUBECONFIG, --manifests, --kubeconfig, --master or --config")
    with cli_errors():
        found = plan(flags, verbose=verbose)
    show_answer(found, output, as_text)

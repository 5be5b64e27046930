"""The commands and their options."""

import errno
import sys
from typing import Any

import click

from kproxy_core.cli.options import (
    NORMAL,
    OBJECTS,
    TEXT_OR_JSON,
    FlagCommand,
    FlagGroup,
    given,
    parsed,
    with_flags,
)
from kproxy_core.cli.run import cli_errors, run, warn_of_broken, write_config
from kproxy_core.cli.terminal import formatted_answer, is_terminal, show, show_answer
from kproxy_core.config.flags import OLDER, PROCESS, RULES, SOURCES, spared_by_cleanup, truth, version_told

# The commands that look at a node, and their options.


@click.command(cls=FlagCommand)
@click.argument("words", metavar="[FROM] TO", nargs=-1, required=True)
@click.option("--from", "sender", metavar="ADDRESS", help="The sender's address.")
@click.option("--from-pod", "origin", flag_value="pod", help="The sender is a pod of this node.")
@click.option("--from-node", "origin", flag_value="node", help="The sender is a process of this node.")
@click.option("--report", metavar="FILE", help="Answer from an archive of `kproxy report`.")
@with_flags(RULES, SOURCES)
@TEXT_OR_JSON
def explain(
    words: tuple[str, ...], sender: str | None, origin: str | None, report: str | None, output: str,
    **options: Any,
) -> None:
    """Explain the fate of packets to a frontend, from the plans and from the kernel.

    TO is ADDRESS[:PORT[/PROTOCOL]], node:PORT[/PROTOCOL] or [NAMESPACE/]SERVICE[:PORT NAME]. FROM is an
    address, pod, node or outside; without it, the answer has one of each. The running proxy answers. With
    --manifests, --kubeconfig, --master or --config the answer is from those objects, and shows the rules that
    a proxy would write.
    """
    from kproxy_core.cli.explain import as_text, ask_proxy, explain_objects, explain_report

    if len(words) > 2 or (len(words) == 2 and sender):
        raise click.UsageError("give [FROM] TO")
    sender = sender or (words[0] if len(words) == 2 else "")
    request = {"to": words[-1], "from": sender, "origin": origin or ""}
    flags = given(options)
    with cli_errors():
        if report:
            packets = explain_report(request, report)
        elif OBJECTS & set(flags):
            packets = explain_objects(request, flags)
        else:
            packets = ask_proxy(request)
    show_answer({"packets": packets}, output, as_text)


@click.command(cls=FlagCommand)
@with_flags(RULES, SOURCES)
@TEXT_OR_JSON
def diff(output: str, **options: Any) -> int:
    """Compare the kernel with the Services, by what it does with packets. Nothing is written.

    Exit status: 0 the same, 1 different, 2 it cannot be told. The running proxy answers. With --manifests,
    --kubeconfig, --master or --config this process compares, also beside a kube-proxy that writes the rules
    of the same mode.
    """
    from kproxy_core.cli.diff import UNCLEAR, as_text, compare, status_of

    with cli_errors(UNCLEAR):
        found = compare(given(options))
    show_answer(found, output, as_text)
    return status_of(found)


@click.command(cls=FlagCommand)
@click.argument("objects", metavar="[DIR|KUBECONFIG]", default="")
@click.option("-v", "--verbose", is_flag=True, help="Print the transactions, too.")
@with_flags(RULES, SOURCES)
@TEXT_OR_JSON
def plan(objects: str, verbose: bool, output: str, **options: Any) -> None:
    """Say what would change on this node if these objects were served. Nothing is written.

    The objects are in DIR, or an API server has them. With --mode, another mode would serve them.
    """
    from kproxy_core.cli import plan as previewing

    flags = previewing.with_objects(objects, given(options))
    if not OBJECTS & set(flags):
        raise click.UsageError("give DIR, KUBECONFIG, --manifests, --kubeconfig, --master or --config")
    with cli_errors():
        found = previewing.plan(flags, verbose=verbose)
    show_answer(found, output, previewing.as_text)


@click.command(cls=FlagCommand)
@click.option("--traffic", is_flag=True, help="Open connections; `kproxy diff` compares without any.")
@click.option("--service", metavar="[NAMESPACE/]NAME[:PORT NAME]", default="",
              help="Only its frontends.")
@click.option("--rate", type=click.FloatRange(0.1, 10_000), default=50, show_default=True,
              help="Connections a second.")
@click.option("--connections", type=click.IntRange(1), default=50, show_default=True,
              help="The most for one frontend.")
@click.option("--timeout", type=click.FloatRange(0.1, 60), default=2, show_default=True,
              help="Seconds after which a connection hangs.")
@click.option("--dry-run", is_flag=True, help="Only say what would be opened.")
@with_flags(RULES, SOURCES)
@TEXT_OR_JSON
def verify(
    traffic: bool, service: str, rate: float, connections: int, timeout: float, dry_run: bool, output: str,
    **options: Any,
) -> int:
    """Open TCP connections from this node to every frontend, and report which endpoints answer.

    Nothing is sent: each connection is closed at once. Exit status: 0 all do what the plans say, 1 some do
    not, 2 it cannot be told. The running proxy says what is planned; with --manifests, --kubeconfig, --master
    or --config those objects do, also beside a kube-proxy.
    """
    from kproxy_core.cli import verify as verifying
    from kproxy_core.cli.diff import UNCLEAR

    if not traffic:
        raise click.UsageError("--traffic is required: it opens connections; `kproxy diff` needs none")
    with cli_errors(UNCLEAR):
        found = verifying.read_targets(given(options), service)
    if dry_run:
        for line in verifying.announced(found, connections, rate):
            show(line)
        return 0
    results, problem = verifying.verify(found, rate=rate, most=connections, timeout=timeout)
    if problem:
        click.echo(f"Warning: {problem}", err=True)
    show_answer(results, output, verifying.as_text)
    return verifying.status_of(results)


@click.command(cls=FlagCommand)
@click.option("--once", is_flag=True, help="Print once instead of following.")
@click.option("--sort", type=click.Choice(["rate", "connections", "rejected", "failed", "bytes", "name"]),
              default="rate", show_default=True, help="The order.")
@click.option("--filter", "search", metavar="WORDS", default="",
              help="Only service ports whose names have these.")
@click.option("--count", type=click.IntRange(1), default=50, show_default=True,
              help="The most that --once prints.")
@click.option("--interval", type=click.FloatRange(0.5, 3600), default=2, show_default=True,
              help="Seconds between two readings.")
@TEXT_OR_JSON
def top(once: bool, sort: str, search: str, count: int, interval: float, output: str) -> None:
    """Show the Services with their new connections, as the running proxy counts them.

    The proxy counts with `trafficMetrics: service` or `endpoint` in section kproxy of its configuration.
    """
    from kproxy_core.cli import top as screen

    with cli_errors():
        if once or output == "json" or not is_terminal():
            screen.once(sort, search, count, as_json=output == "json")
        else:
            screen.watch(sort, search, interval)


@click.command(cls=FlagCommand)
@click.argument("target", metavar="TO")
@click.argument("sender", metavar="[FROM]", default="")
@click.option("--count", type=click.IntRange(1), default=10, show_default=True, help="End after N packets.")
@click.option("--seconds", type=click.FloatRange(0.1, 3600), default=30, show_default=True,
              help="End after this time.")
@with_flags(RULES, SOURCES)
@TEXT_OR_JSON
def trace(target: str, sender: str, count: int, seconds: float, output: str, **options: Any) -> int:
    """Watch the next packets to a frontend, and print what happens to each.

    TO is as for `kproxy explain`, FROM an address. Only first packets of connections are shown, 50 a second
    at most. With -o json, each packet is one line. Exit status: 0 if a packet was seen, 1 if not.
    """
    from kproxy_core.app.explain import parse_sender
    from kproxy_core.cli.trace import Trace, formatted, read_answers

    seen = 0
    watch: Trace | None = None
    try:
        with cli_errors():
            wanted = parse_sender(sender)
            answers, dialled = read_answers(target, given(options))
            watch = Trace(answers, wanted, dialled)
            for packet in watch.packets(count=count, seconds=seconds):
                show(formatted(packet, output))
                seen += 1
    except KeyboardInterrupt:
        pass
    for problem in watch.problems if watch is not None else ():
        click.echo(f"Warning: {problem}", err=True)
    if not seen:
        click.echo(f"no packet to {target} was seen in {seconds:g} s", err=True)
    return 0 if seen else 1


@click.command(cls=FlagCommand)
@click.argument("file", metavar="[FILE]", default="")
@with_flags(RULES, SOURCES)
@TEXT_OR_JSON
def report(file: str, output: str, **options: Any) -> None:
    """Write an archive for a bug report, which `kproxy explain --report` can answer from.

    It has version, configuration, objects, plans, kernel state, differences, metrics, the last lines of the
    log and what works on this machine: addresses and names of Services, but no secrets. The running proxy
    tells them, or --manifests, --kubeconfig, --master or --config do.

    FILE must not exist. - is the standard output, which is the default unless it is a terminal; the list of
    contents is then printed to the standard error.
    """
    import sys

    from kproxy_core.cli import report as reporting

    is_piped = file in ("-", "/dev/stdout") or not (file or sys.stdout.isatty())
    if is_piped and sys.stdout.isatty():
        raise click.UsageError("the archive is not written to a terminal: name a file or use a pipe")
    where = "standard output" if is_piped else file or reporting.new_name()
    try:
        with cli_errors(), sys.stdout.buffer if is_piped else reporting.create(where) as archive:
            names = reporting.write(archive, reporting.contents(given(options)))
    except OSError as error:
        read_only = "; `kproxy report >FILE` writes no file here" if error.errno == errno.EROFS else ""
        raise click.ClickException(f"{where}: {error.strerror}{read_only}") from error
    text = formatted_answer(
        {"file": where, "contents": names}, output, lambda _: f"{where}: {', '.join(names)}")
    click.echo(text, err=is_piped)


COMMANDS = (explain, diff, plan, verify, trace, report, top)


# The commands and their options.

def main() -> None:
    """Run the console script. Exit with status 0, with that of the command, or with 1 for wrong usage."""
    try:
        status = kproxy.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = 1 if isinstance(error, click.UsageError) else error.exit_code
    except click.Abort:
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


@click.group(cls=FlagGroup, invoke_without_command=True, context_settings=NORMAL)
@with_flags(RULES, PROCESS, OLDER)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), help="Of --cleanup; text by default.")
@click.pass_context
def kproxy(context: click.Context, /, output: str | None, **options: Any) -> None:
    """A Kubernetes service proxy. Without a command, runs it."""
    flags = given(options)
    version = parsed("version", flags, version_told, "")
    if version:
        click.echo(version)
        context.exit()
    if context.invoked_subcommand is not None:
        return
    cleanup, dry_run, own_only = (
        parsed(name, flags, truth, False) for name in ("cleanup", "dry_run", "own_only"))
    if not cleanup and (dry_run or own_only or output):
        raise click.UsageError("--dry-run, --own-only and --output require --cleanup")
    if "write_config_to" in flags:
        write_config(flags)
    elif cleanup:
        from kproxy_core.cli.cleanup import clean

        try:
            spared = spared_by_cleanup(flags)
        except ValueError as error:
            raise click.UsageError(f"--cleanup of some modes: {error}") from error
        clean(flags, spared, dry_run=dry_run, own_only=own_only, as_json=output == "json")
    else:
        run(flags, init_only=parsed("init_only", flags, truth, False))


@kproxy.command(cls=FlagCommand)
@click.argument("only", metavar="[MODE]", default="")
@with_flags(RULES)
@click.option("--probe", is_flag=True, help="Find out which work on this machine, and what is missing.")
@click.option("--load-modules", is_flag=True, help="With --probe: load kernel modules for it.")
@click.option("-o", "--output", type=click.Choice(["text", "json", "yaml"]), default="text",
              show_default=True)
def modes(only: str, probe: bool, load_modules: bool, output: str, **options: Any) -> int:
    """List the installed backends, the preferred one first, or only MODE.

    With --probe the exit status is 0 if MODE works on this machine (without one: any), else 1.
    """
    from kproxy_core.cli.modes import describe, find_out, formatted
    from kproxy_core.contract.registry import Registry
    from kproxy_core.modes.settings import Configuration

    if load_modules and not probe:
        raise click.UsageError("--load-modules requires --probe")
    flags = given(options)
    with cli_errors():
        configuration = Configuration.read(flags)
        registry = Registry(plugins=configuration.of("").kproxy.plugins)
        mode = only or flags.get("mode", "")
        if probe:
            report = find_out(registry, mode, configuration, load_modules=load_modules)
        else:
            report = describe(registry, mode)
    show(formatted(report, output))
    warn_of_broken(registry)
    return 0 if report.works(mode or configuration.mode) else 1


@kproxy.command()
@click.argument("mode")
@click.option("--check", is_flag=True, help="Only say what would change for this node's Services.")
@TEXT_OR_JSON
def switch(mode: str, check: bool, output: str) -> None:
    """Have the proxy that runs here serve in another MODE. Connections don't notice."""
    from kproxy_core.cli import switch as switching

    with cli_errors():
        if not check:
            switching.switch(mode, as_json=output == "json")
        elif not switching.check(mode, as_json=output == "json"):
            raise click.ClickException(f"not everything would be served with {mode}")


@kproxy.command(cls=FlagCommand)
@with_flags(RULES)
@click.option("--family", type=click.Choice(["ipv4", "ipv6"]), help="Only this one.")
@click.option("--check", is_flag=True, help="Only say whether the mechanism's own program takes the rules.")
def render(family: str | None, check: bool, **options: Any) -> None:
    """Print the rules that the manifests ask for. The kernel is left alone, and no privileges are needed.

    With --check, rules that are text for nft are checked in a network namespace of their own. Exit status: 0
    if they are accepted, else 1.
    """
    from kproxy_core.cli.render import checked, rendered
    from kproxy_core.model.address import Family

    families = tuple(f for f in Family if family in (None, f.label.lower()))
    with cli_errors():
        for line in (checked if check else rendered)(given(options), families):
            click.echo(line)


for command in COMMANDS:
    kproxy.add_command(command)

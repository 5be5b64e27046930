"""``kproxy`` without a command, and functions that several commands share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kproxy_core.config.flags import Flags
    from kproxy_core.config.settings import Config
    from kproxy_core.contract.registry import Registry
    from kproxy_core.kube.access import CurrentAccess
    from kproxy_core.modes.settings import Configuration


class Mistake(click.ClickException):
    """A mistake of the caller. As for `click.UsageError`, the exit status is 2, but usage is not printed."""

    exit_code = 2


def run(flags: Flags, *, init_only: bool) -> None:
    """Run the proxy, or with *init_only* only the steps that need full privileges.

    Exits with 2 for a wrong configuration, and with 1 on another failure.
    """
    # Objects of the start are permanent. Searching them for cycles would take longer than the first sync and
    # find none, until `preparation.settle_memory` excludes them.
    gc.disable()
    from kproxy_core.app.notify import ServiceManager
    from kproxy_core.observe import logs

    manager = ServiceManager.from_environment(os.environ)
    with cli_errors():
        config, registry, configuration = prepare(flags)
        logs.set_up(config.verbosity, config.logging_format)
        logs.log_uncaught()
        access = begin_access(config)
        from kproxy_core.app import assembly
        from kproxy_core.modes.standby import await_turn

    for notice in (*config.notices, *registry.broken):
        assembly.log.warning(str(notice))
    try:
        with cli_errors():
            if init_only:
                assembly.set_up(config, registry, configuration, access)
                return
            lock, waited = await_turn(
                config.kproxy.state_directory, exclusive=config.kproxy.exclusive,
                standing_by=lambda text: manager.send(f"STATUS={text}"))
            if waited:  # The other process may have switched modes.
                config, registry, configuration = prepare(flags)
                access = begin_access(config)
            try:
                assembly.run(config, registry, configuration, access, manager)
            finally:
                if lock is not None:
                    lock.release()
    except click.ClickException as error:
        assembly.log.error(error.message)
        sys.exit(error.exit_code)


def begin_access(config: Config) -> CurrentAccess:
    """Return the access to the API server. A child process loads it while this one imports the rest.

    Raises Mistake or StartFailed.
    """
    from kproxy_core.kube.access import AccessError, CurrentAccess, WrongOption
    from kproxy_core.modes.settings import StartFailed

    access = CurrentAccess(config.master, config.client.kubeconfig)
    try:
        if not config.kproxy.manifests:
            access.begin()
    except WrongOption as error:
        raise Mistake(str(error)) from error
    except AccessError as error:
        raise StartFailed(str(error)) from error
    return access


def write_config(flags: Flags) -> None:
    """Write the effective configuration to the file that ``--write-config-to`` names."""
    from kproxy_core.config.settings import written
    from kproxy_core.contract.registry import Registry
    from kproxy_core.modes.settings import Configuration

    path = flags["write_config_to"]
    with cli_errors():
        config = Configuration.read(flags).asked
        if config.mode:
            Registry(plugins=config.kproxy.plugins).check_mode(config.mode)
        text = written(config)
        try:
            with open(path, "w", encoding="utf-8") as output:
                output.write(text)
        except OSError as error:
            raise Mistake(f"--write-config-to: {path!r}: {error.strerror}") from error
    for notice in config.notices:
        click.echo(f"Warning: {notice}", err=True)
    click.echo(f"the configuration was written to {path}", err=True)


def warn_of_broken(registry: Registry) -> None:
    for broken in registry.broken:
        click.echo(f"Warning: {broken}", err=True)


def registry_of(flags: Flags) -> Registry:
    """Return the registry for a question about the mode of a running proxy, with the plugins of *flags*."""
    from kproxy_core.contract.registry import Registry

    return Registry(plugins=flags["plugin"].split(",") if "plugin" in flags else ())


def prepare(flags: Flags) -> tuple[Config, Registry, Configuration]:
    """Return the effective configuration of the mode to start in, the plugins, and the one that was given.

    The mode stays "" if neither the operator nor an earlier switch named one. Raises as `cli_errors` expects.
    """
    from kproxy_core.contract.registry import Registry
    from kproxy_core.modes.journal import Journal
    from kproxy_core.modes.settings import Configuration

    configuration = Configuration.read(flags)
    config = configuration.of(configuration.mode)
    registry = Registry(plugins=config.kproxy.plugins)
    mode = Journal(config.kproxy.state_directory).starting_mode(
        config.mode, registry.modes, by_label=bool(config.kproxy.mode_from_node_label)) or config.mode
    if mode != config.mode:
        config = configuration.of(mode)
    if mode:
        registry.load(mode)
    return config, registry, configuration


@contextmanager
def cli_errors() -> Iterator[None]:
    """Turn expected errors into one line, and status 1, or 2 for a mistake. Any other is a bug."""
    try:
        yield
    except Exception as error:
        # Imported only now: for a command that asks the running proxy, this is a third of its time.
        from kproxy_core.app.errors import Misused, NoAnswer, NoProxy, RequestRefused, RestartNeeded
        from kproxy_core.config.file import ConfigError
        from kproxy_core.contract.errors import BackendError, InvalidInput
        from kproxy_core.linux.errors import HostError
        from kproxy_core.modes.settings import StartFailed

        expected = (BackendError, ConfigError, HostError, NoAnswer, NoProxy, RequestRefused, RestartNeeded,
                    StartFailed)
        if not isinstance(error, expected):
            raise
        lines = error.problems if isinstance(error, ConfigError) else [error]
        is_mistake = isinstance(error, (ConfigError, InvalidInput, Misused))
        raise (Mistake if is_mistake else click.ClickException)("\n".join(map(str, lines))) from error

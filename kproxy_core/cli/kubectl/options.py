"""Options that name a cluster and its nodes, and the errors of asking them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kproxy_core.cli.run import Mistake
from kproxy_core.linux import packages

if TYPE_CHECKING:
    from kproxy_core.fleet.cluster import Cluster

_CLUSTER = (
    click.option("--kubeconfig", metavar="FILE", default="", help="As kubectl's."),
    click.option("--context", metavar="NAME", default="", help="As kubectl's."),
)
_SELECTOR = click.option("-l", "--selector", metavar="LABELS", default="",
                         help="Labels of the kproxy pods.  [default: k8s-app=kproxy]")


def _proxies(*names: str) -> Callable[..., Any]:
    return click.option(*names, "proxies", metavar="NAME", default="",
                        help="Namespace of the kproxy pods.  [default: kube-system]")


_OPTIONS = (*_CLUSTER, _proxies("-n", "--namespace"), _SELECTOR)
_OPTIONS_WITH_NAMESPACE = (
    *_CLUSTER,
    click.option("-n", "--namespace", metavar="NAME", default="",
                 help="Namespace of pods and Services.  [default: the context's]"),
    _proxies("--kproxy-namespace"), _SELECTOR,
)

NODES = click.option("--nodes", metavar="LABELS", default="", help="Only nodes with these labels.")


def with_cluster(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name a cluster, and pass it as *cluster*. Turn its errors into one line."""
    return _with_options(command, _OPTIONS)


def with_cluster_and_namespace(command: Callable[..., Any]) -> Callable[..., Any]:
    """As `with_cluster`, for a command about objects in a *namespace*, which it is passed, too."""
    return _with_options(command, _OPTIONS_WITH_NAMESPACE)


def _with_options(
    command: Callable[..., Any], options: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    @functools.wraps(command)
    def run(*, kubeconfig: str, context: str, proxies: str, selector: str, **others: Any) -> Any:
        with fleet_errors():
            return command(cluster=_cluster(kubeconfig, context, proxies, selector), **others)

    for option in reversed(options):
        run = option(run)
    return run


def _cluster(kubeconfig: str, context: str, namespace: str, selector: str) -> "Cluster":
    require("api", "kubernetes", "urllib3", "websocket-client")
    from kproxy_core.fleet.cluster import Cluster

    return Cluster(kubeconfig, context, namespace, selector)


def require(extra: str, *names: str) -> None:
    """Raise ClickException if one of these packages, which *extra* has, is not installed."""
    if problem := packages.lacking(extra, *names):
        raise click.ClickException(f"kubectl kproxy {problem}")


@contextmanager
def fleet_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        from kproxy_core.fleet.errors import BadKubeconfig, Forbidden, NoCluster, Unreached

        if isinstance(error, BadKubeconfig):
            raise Mistake(str(error)) from error
        if isinstance(error, (Forbidden, NoCluster, Unreached)):
            raise click.ClickException(str(error)) from error
        raise

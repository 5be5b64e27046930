"""The expected answers in the shop: for each frontend and client, the endpoints and the source they see."""

from dataclasses import dataclass

from examples.demo import network
from examples.demo.network import NAMES
from examples.demo.probes import Answer, Frontend, ask
from kproxy_conformance.network.namespaces import Namespace

ENOUGH = 12
"""Connections for each row, at least."""

LIMIT = 300
"""Connections after which an endpoint that has not answered counts as missing."""

WEB = Frontend("10.96.0.10", 80)
WEB_IPV6 = Frontend("fd00:10:96::10", 80)
WEB_NODE_PORT = Frontend(network.NODE["node1"], 30080)
WEB_LOAD_BALANCER = Frontend("203.0.113.10", 80)
CHECKOUT = Frontend("10.96.0.20", 443)
CHECKOUT_NODE_PORT = Frontend(network.NODE["node1"], 30443)
CHECKOUT_LOAD_BALANCER = Frontend("203.0.113.20", 443)
CART = Frontend("10.96.0.30", 80)
DNS = Frontend("10.96.0.53", 53, "UDP")
PAYMENTS = Frontend("10.96.0.40", 443)
SEARCH = Frontend("10.96.0.50", 80)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a frontend, the client, and the expected answers."""

    service: str
    kind: str
    frontend: Frontend
    source: str
    """The host that dials."""
    answered_by: frozenset[str]
    """The endpoints that answer, all of them and no other; empty: the connection is refused."""
    seen_as: str
    """The host whose address the endpoint sees."""
    sticky: bool = False
    """One of `answered_by`, always the same."""


def _row(
    service: str, kind: str, frontend: Frontend, source: str, by: str, seen_as: str, **more: bool
) -> Row:
    return Row(service, kind, frontend, source, frozenset(by.split()), seen_as, **more)


ROWS = (
    _row("web", "ClusterIP", WEB, "shell", "web-a web-b web-c", "shell"),
    _row("web", "ClusterIP", WEB, "node1", "web-a web-b web-c", "node1"),
    _row("web", "ClusterIP", WEB, "customer", "web-a web-b web-c", "node1"),
    _row("web", "ClusterIP", WEB_IPV6, "shell", "web-a web-b web-c", "shell"),
    _row("web", "NodePort", WEB_NODE_PORT, "shell", "web-a web-b web-c", "node1"),
    _row("web", "NodePort", WEB_NODE_PORT, "node1", "web-a web-b web-c", "node1"),
    _row("web", "NodePort", WEB_NODE_PORT, "customer", "web-a web-b web-c", "node1"),
    _row("web", "LoadBalancer", WEB_LOAD_BALANCER, "shell", "web-a web-b web-c", "node1"),
    _row("web", "LoadBalancer", WEB_LOAD_BALANCER, "node1", "web-a web-b web-c", "node1"),
    _row("web", "LoadBalancer", WEB_LOAD_BALANCER, "customer", "web-a web-b web-c", "node1"),
    # Policy Local: a customer gets this node's endpoint only, which sees the customer's own address.
    # Pods and the node are inside the cluster and take the short circuit to all endpoints.
    _row("checkout", "ClusterIP", CHECKOUT, "shell", "checkout-a checkout-b", "shell"),
    _row("checkout", "LoadBalancer", CHECKOUT_LOAD_BALANCER, "shell", "checkout-a checkout-b", "shell"),
    _row("checkout", "LoadBalancer", CHECKOUT_LOAD_BALANCER, "node1", "checkout-a checkout-b", "node1"),
    _row("checkout", "LoadBalancer", CHECKOUT_LOAD_BALANCER, "customer", "checkout-a", "customer"),
    _row("checkout", "NodePort", CHECKOUT_NODE_PORT, "customer", "checkout-a", "customer"),
    _row("cart", "affinity", CART, "shell", "cart-a cart-b", "shell", sticky=True),
    _row("names", "ClusterIP", DNS, "shell", "names-a", "shell"),
    _row("payments", "ClusterIP", PAYMENTS, "shell", "bank", "shell"),
    _row("search", "no endpoints", SEARCH, "shell", "", ""),
)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of the connections of one row."""

    answered_by: frozenset[str]
    seen: frozenset[str]
    """Source addresses."""
    trouble: str
    """The problem; "" without one."""


def judge(row: Row, hosts: dict[str, Namespace]) -> Found:
    """Dial until every expected endpoint has answered, and return the result."""
    answers: list[Answer] = []
    wanted = 1 if row.sticky else len(row.answered_by)
    try:
        while len(answers) < ENOUGH or (len({a.by for a in answers}) < wanted and len(answers) < LIMIT):
            answers.append(ask(hosts[row.source], row.frontend))
    except ConnectionRefusedError:
        refused_as_expected = not row.answered_by and not answers
        return Found(frozenset(), frozenset(), "" if refused_as_expected else "refused")
    except OSError as error:
        return Found(frozenset(), frozenset(), str(error))
    by = frozenset(answer.by for answer in answers)
    seen = frozenset(answer.seen for answer in answers)
    return Found(by, seen, _trouble(row, by, seen))


def _trouble(row: Row, by: frozenset[str], seen: frozenset[str]) -> str:
    if by - row.answered_by:
        return f"{', '.join(sorted(by - row.answered_by))} should not answer"
    if row.sticky:
        return "" if len(by) == 1 else "more than one endpoint answered one client"
    if row.answered_by - by:
        return f"{', '.join(sorted(row.answered_by - by))} did not answer"
    if {NAMES.get(address) for address in seen} != {row.seen_as}:
        return f"should be seen as {row.seen_as}"
    return ""

"""Checks with real packets: clients are answered, refused or dropped as they should be."""

import time

from kproxy_core.backend.api import Leftovers
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.model.address import Protocol
from kproxy_core.testing.conformance.checks import Checks, Failed, expect
from kproxy_core.testing.conformance.play import Play

CHECKS = Checks()

UDP = Protocol.UDP
_PATIENCE = 20.0
"""Seconds until a backend has noticed that a connection was reset."""


@CHECKS.each_family
def counts_each_connection_once(play: Play) -> None:
    """With `count_traffic`, each new connection is counted once for its frontend and endpoint."""
    play.count_traffic()
    play.serve("web", "80@30080", to="near")
    play.serve("dns", "53/UDP", to="near", number=2)
    play.serve("none", to="", number=3)
    dials = ((play.cluster_ip(), "near", 5), (play.cluster_ip(53, UDP, 2), "near", 4),
             (play.node_port(30080), "client", 3))
    for frontend, host, tries in dials:
        play.ask_often(host, frontend, tries=tries)
    play.serve("web", "80@30080", to="other")
    play.ask_often("near", play.cluster_ip(), tries=2)
    play.refused("near", play.cluster_ip(number=3))
    wanted = {(frontend, "near"): tries for frontend, _, tries in dials}
    wanted |= {(play.cluster_ip(), "other"): 2, (play.cluster_ip(number=3), ""): 1}
    counted = play.traffic()
    expect(counted == wanted, f"kproxy_traffic returned {counted} for {wanted}")


@CHECKS.each_family
def cluster_ip_reaches_every_endpoint(play: Play) -> None:
    """Pods and the node reach each endpoint of a ClusterIP over TCP, on this node and others."""
    play.serve("web")
    play.reaches("near", play.cluster_ip(), "near", "other", "far")
    play.reaches("node", play.cluster_ip(), "near", "other", "far")


@CHECKS.each_family
def udp_reaches_every_endpoint(play: Play) -> None:
    """Pods and the node reach each endpoint of a ClusterIP over UDP; each flow is balanced by itself."""
    play.serve("dns", "53/UDP")
    play.reaches("near", play.cluster_ip(53, UDP), "near", "other", "far")


@CHECKS.each_family
def two_protocols_share_a_port(play: Play) -> None:
    """The same port over TCP and UDP is two service ports, which do not affect each other."""
    play.serve("web", "80@30081", to="near")
    play.serve("dns", "80/UDP@30081", to="other")
    for host, frontend in (("node", play.cluster_ip()), ("client", play.node_port(30081))):
        play.reaches(host, frontend, "near")
        play.reaches(host, frontend._replace(protocol=UDP), "other")


@CHECKS.each_family
def pods_see_the_client_pod(play: Play) -> None:
    """An endpoint sees the client pod's address: traffic between pods is not masqueraded."""
    play.serve("web", to="other far")
    for answer in play.ask_often("near", play.cluster_ip(), tries=8):
        expect(answer.seen == "near", f"{answer.by} sees a client {answer.seen}, not the pod that asks")


@CHECKS.each_family
def a_pod_reaches_itself(play: Play) -> None:
    """An endpoint that dials its own Service can reach itself (hairpin)."""
    play.serve("web", to="near")
    play.reaches("near", play.cluster_ip(), "near")


@CHECKS.each_family
def node_port_serves_clients_outside(play: Play) -> None:
    """A client outside reaches each endpoint at the node's address, over TCP and UDP."""
    play.serve("web", "http:80@30080", "dns:53/UDP@30053")
    play.reaches("client", play.node_port(30080), "near", "other", "far")
    play.reaches("client", play.node_port(30053, UDP), "near", "other", "far")


@CHECKS.each_family
def external_ip_serves_clients_outside(play: Play) -> None:
    """A client outside and a pod reach each endpoint at an external IP."""
    play.serve("web", external_ips=play.at.external_ip(1))
    for host in ("client", "near"):
        play.reaches(host, play.external(1), "near", "other", "far")


@CHECKS.each_family
def external_ip_serves_the_node(play: Play) -> None:
    """The node itself reaches each endpoint at an external IP."""
    play.serve("web", external_ips=play.at.external_ip(1))
    play.reaches("node", play.external(1), "near", "other", "far")


@CHECKS.each_family
def load_balancer_ip_serves_clients_outside(play: Play) -> None:
    """A client outside and a pod reach each endpoint at a load balancer IP."""
    play.serve("web", "80@30080", load_balancer_ips=play.at.external_ip(2))
    for host in ("client", "near"):
        play.reaches(host, play.external(2), "near", "other", "far")


@CHECKS.each_family
def no_endpoints_refuses(play: Play) -> None:
    """Without any endpoint, clients are refused at once, at every kind of frontend."""
    play.serve("web", "80@30080", to="", external_ips=play.at.external_ip(1))
    play.serve("dns", "53/UDP", to="", number=2)
    for host in ("near", "node"):
        play.refused(host, play.cluster_ip())
        play.refused(host, play.cluster_ip(53, UDP, 2))
    for frontend in (play.node_port(30080), play.external(1)):
        play.refused("client", frontend)


@CHECKS.each_family
def affinity_keeps_a_client_at_its_endpoint(play: Play) -> None:
    """With session affinity, a client keeps its endpoint at every kind of frontend."""
    play.serve("web", "80@30080", affinity=600, external_ips=play.at.external_ip(1))
    for host, frontend in (("near", play.cluster_ip()), ("client", play.external(1))):
        found = {answer.by for answer in play.ask_often(host, frontend, tries=12)}
        expect(len(found) == 1, f"{host} was sent to {', '.join(sorted(found))} by {frontend}")


@CHECKS.each_family
def source_ranges_keep_others_out(play: Play) -> None:
    """A load balancer IP with source ranges serves clients in them, and drops all others."""
    allowed, other = play.at.clients
    ranges = f"{allowed}/{play.at.bits}"
    play.serve("web", "80@30080", load_balancer_ips=play.at.external_ip(2), source_ranges=ranges)
    play.ask("client", play.external(2), allowed)
    play.unanswered("client", play.external(2), other)


@CHECKS.each_family
def external_policy_local_keeps_the_client_address(play: Play) -> None:
    """With external policy Local, only this node's endpoints serve clients outside, and see their address."""
    play.serve(
        "web", "80@30080", to="near far", load_balancer_ips=play.at.external_ip(2), external_local=True
    )
    for frontend in (play.node_port(30080), play.external(2)):
        for answer in play.ask_often("client", frontend, tries=8):
            expect(answer.by == "near", f"{frontend} is answered by {answer.by}, which is not on this node")
            expect(answer.seen == "client", f"at {frontend} the endpoint sees {answer.seen}, not the client")


@CHECKS.each_family
def external_policy_local_without_local_endpoints_is_silent(play: Play) -> None:
    """With external policy Local and endpoints elsewhere, outside clients are dropped, pods are served."""
    play.serve("web", "80@30080", to="far", load_balancer_ips=play.at.external_ip(2), external_local=True)
    play.unanswered("client", play.node_port(30080), silent=True)
    play.unanswered("client", play.external(2), silent=True)
    play.reaches("near", play.external(2), "far")


@CHECKS.each_family
def internal_policy_local_stays_on_the_node(play: Play) -> None:
    """With internal policy Local, only this node's endpoints serve a ClusterIP; without any, none do."""
    play.serve("web", to="other far", internal_local=True)
    play.reaches("near", play.cluster_ip(), "other")
    play.serve("web", to="far", internal_local=True)
    play.unanswered("near", play.cluster_ip(), silent=True)


@CHECKS.each_family
def endpoints_that_go_get_no_new_connections(play: Play) -> None:
    """New connections use the current endpoints; removed endpoints keep their established connections."""
    play.serve("web", to="near other")
    with play.connection("node", play.cluster_ip()) as lasting:
        staying, going = ("other", "near") if lasting.answer.by == "near" else ("near", "other")
        play.serve("web", to=f"{staying} far")
        play.reaches("node", play.cluster_ip(), staying, "far")
        expect(
            lasting.echoes() or going == staying, f"a connection to {going} was cut when it left the Service"
        )


@CHECKS.each_family
def deleted_service_is_not_served(play: Play) -> None:
    """A deleted Service is not served; other Services still are."""
    play.serve("web", "80@30080", to="near")
    play.serve("shop", to="other", number=2)
    play.ask("client", play.node_port(30080))
    play.remove("web")
    play.unanswered("node", play.cluster_ip())
    play.unanswered("client", play.node_port(30080))
    play.reaches("near", play.cluster_ip(number=2), "other")


@CHECKS.each_family
def restart_goes_unnoticed(play: Play) -> None:
    """Connections survive a restart, and new ones are served during it and after it."""
    play.serve("web", to="other far")
    with play.connection("near", play.cluster_ip()) as lasting:
        play.subject.end(play.instance)
        play.reaches("near", play.cluster_ip(), "other", "far")
        play.begin()
        expect(lasting.echoes(), "a restart cut an established connection")
        play.reaches("near", play.cluster_ip(), "other", "far")
        play.serve("web", to="other")
        play.reaches("near", play.cluster_ip(), "other")


@CHECKS.each_family
def retiring_cuts_no_connection(play: Play) -> None:
    """A retired mode keeps established connections until they end; then nothing of it is left."""
    play.serve("web", to="other far")
    subject = play.subject
    with play.connection("near", play.cluster_ip()) as lasting:
        play.have_successor()
        instance: BackendInstance | None = play.instance
        if not _retire(play, instance).waiting:
            subject.end(play.instance)
            _cleaned(play)
            instance = None
        expect(lasting.echoes(), "an established connection was cut")
    until = time.monotonic() + _PATIENCE
    while (left := _retire(play, instance)).waiting:
        if time.monotonic() > until:
            raise Failed(f"{left.waiting} connections are still waited for, and the only one was reset")
        time.sleep(0.1)


def _retire(play: Play, instance: BackendInstance | None) -> Leftovers:
    left = play.subject.retire(instance)
    expect(not left.errors, f"kproxy_retire: {'; '.join(left.errors)}")
    return left


def _cleaned(play: Play) -> None:
    left = play.subject.cleanup()
    expect(not left.errors, f"kproxy_cleanup: {'; '.join(left.errors)}")

"""``python -m tests.cluster.dns KUBECONFIG``: a cluster DNS on port 53, as kubernetes/dns 1.1.0 asks for."""

import ipaddress
import os
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdata
import dns.reversename
from dns.rdatatype import AAAA, CNAME, PTR, SRV, TXT, A, RdataType
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient

DOMAIN = dns.name.from_text("cluster.local")
_SERVICES = dns.name.from_text("svc", DOMAIN)
_PODS = dns.name.from_text("pod", DOMAIN)
_REVERSE = (dns.name.from_text("in-addr.arpa"), dns.name.from_text("ip6.arpa"))
_TTL = 5
_UDP = 512
"""Bytes of an answer to a client that says nothing of EDNS."""

Key = tuple[str, str]
"""A namespace and a name in it."""
Object = dict[str, Any]
Record = tuple[dns.name.Name, RdataType, str]


class Objects:
    """The cluster's Services and slices. A thread for each kind keeps them current."""

    def __init__(self) -> None:
        resources = DynamicClient(client.ApiClient()).resources
        self.services = _follow(resources.get(api_version="v1", kind="Service"))
        self.slices = _follow(resources.get(api_version="discovery.k8s.io/v1", kind="EndpointSlice"))

    def records(self, asked: dns.name.Name) -> list[Record] | None:
        """Return what is known of a name, of all types; None: it does not exist."""
        if asked == dns.name.from_text("dns-version", DOMAIN):
            return [(asked, TXT, '"1.1.0"')]
        if asked.is_subdomain(_SERVICES):
            found = list(self._of_service(asked, _labels(asked, _SERVICES)))
        elif asked.is_subdomain(_PODS):
            found = list(_of_pod(asked, _labels(asked, _PODS)))
        elif any(asked.is_subdomain(zone) for zone in _REVERSE):
            found = list(self._of_address(asked))
        else:
            return [] if _SERVICES.is_subdomain(asked) or _PODS.is_subdomain(asked) else None
        return found or None

    def _of_service(self, asked: dns.name.Name, labels: list[str]) -> Iterator[Record]:
        if len(labels) < 2:
            return
        *first, name, namespace = labels
        if (service := self.services.get((namespace, name))) is None:
            return
        spec = service["spec"]
        if spec["type"] == "ExternalName":
            if not first:
                yield asked, CNAME, spec["externalName"].rstrip(".") + "."
        elif spec["clusterIP"] != "None":
            if not first:
                for ip in spec["clusterIPs"]:
                    yield asked, _type(ip), ip
            for port in spec["ports"]:
                if first == _names(port):
                    yield asked, SRV, f"0 100 {port['port']} {dns.name.Name(asked.labels[2:])}"
        else:
            yield from self._of_endpoints((namespace, name), asked, first)

    def _of_endpoints(self, key: Key, asked: dns.name.Name, first: list[str]) -> Iterator[Record]:
        for ports, endpoint, ip in self._ready(key):
            host = _host(endpoint, ip)
            if first in ([], [host]):
                yield asked, _type(ip), ip
            for port in ports:
                if first == _names(port):
                    target = dns.name.from_text(host, dns.name.Name(asked.labels[2:]))
                    yield asked, SRV, f"0 100 {port['port']} {target}"

    def _of_address(self, asked: dns.name.Name) -> Iterator[Record]:
        try:
            ip = dns.reversename.to_address(asked)
        except dns.exception.DNSException:
            return
        for (namespace, name), service in list(self.services.items()):
            owner = f"{name}.{namespace}.{_SERVICES}"
            if ip in service["spec"].get("clusterIPs", ()):
                yield asked, PTR, owner
            elif service["spec"].get("clusterIP") == "None":
                for _, endpoint, address in self._ready((namespace, name)):
                    if ip == address and "hostname" in endpoint:
                        yield asked, PTR, f"{endpoint['hostname']}.{owner}"

    def _ready(self, key: Key) -> Iterator[tuple[list[Object], Object, str]]:
        """Yield the ports, the endpoint and the address of each endpoint that is ready."""
        for (namespace, _), piece in list(self.slices.items()):
            if (namespace, piece["metadata"].get("labels", {}).get("kubernetes.io/service-name")) == key:
                for endpoint in piece.get("endpoints") or ():
                    if endpoint.get("conditions", {}).get("ready", True):
                        yield piece.get("ports") or [], endpoint, endpoint["addresses"][0]


def _follow(resource: Any) -> dict[Key, Object]:
    """List objects, and return them by their keys. A thread changes them as they change."""

    def key(item: Object) -> Key:
        return item["metadata"]["namespace"], item["metadata"]["name"]

    listed = resource.get().to_dict()
    objects = {key(item): item for item in listed["items"]}

    def keep_watching(version: str) -> None:
        while True:
            for event in resource.watch(resource_version=version):
                item = event["raw_object"]
                version = item["metadata"]["resourceVersion"]
                if event["type"] == "DELETED":
                    objects.pop(key(item), None)
                else:
                    objects[key(item)] = item

    threading.Thread(
        target=keep_watching, args=(listed["metadata"]["resourceVersion"],), daemon=True).start()
    return objects


def _labels(asked: dns.name.Name, zone: dns.name.Name) -> list[str]:
    return [label.decode().lower() for label in asked.relativize(zone).labels]


def _of_pod(asked: dns.name.Name, labels: list[str]) -> Iterator[Record]:
    for separator in ".:":
        try:
            ip = str(ipaddress.ip_address(labels[0].replace("-", separator)))
        except (ValueError, IndexError):
            continue
        yield asked, _type(ip), ip


def _names(port: Object) -> list[str]:
    """Return the labels of a port's SRV records."""
    return [f"_{port.get('name', '')}", f"_{port['protocol'].lower()}"]


def _host(endpoint: Object, ip: str) -> str:
    return str(endpoint.get("hostname") or ip.replace(".", "-").replace(":", "-"))


def _type(ip: str) -> RdataType:
    return AAAA if ":" in ip else A


def answer(objects: Objects, query: dns.message.Message) -> dns.message.Message:
    response = dns.message.make_response(query, recursion_available=True)
    question = query.question[0]
    if not any(question.name.is_subdomain(zone) for zone in (DOMAIN, *_REVERSE)):
        response.set_rcode(dns.rcode.REFUSED)
        return response
    response.flags |= dns.flags.AA
    records = objects.records(question.name)
    if records is None:
        response.set_rcode(dns.rcode.NXDOMAIN)
        return response
    for _, kind, text in records.copy():
        if kind == CNAME:
            records += objects.records(dns.name.from_text(text)) or []
    for owner, kind, text in records:
        if kind in (question.rdtype, CNAME):
            added = response.find_rrset(response.answer, owner, question.rdclass, kind, create=True)
            added.add(dns.rdata.from_text(question.rdclass, kind, text), _TTL)
    return response


class _Datagram(socketserver.BaseRequestHandler):
    objects: Objects

    def handle(self) -> None:
        query = dns.message.from_wire(self.request[0])
        response = answer(self.objects, query)
        try:
            wire = response.to_wire(max_size=query.payload or _UDP)
        except dns.exception.TooBig:
            truncated = dns.message.make_response(query)
            truncated.flags |= dns.flags.TC
            wire = truncated.to_wire()
        self.request[1].sendto(wire, self.client_address)


class _Stream(socketserver.StreamRequestHandler):
    objects: Objects

    def handle(self) -> None:
        while len(length := self.rfile.read(2)) == 2:
            query = dns.message.from_wire(self.rfile.read(*struct.unpack(">H", length)))
            wire = answer(self.objects, query).to_wire()
            self.wfile.write(struct.pack(">H", len(wire)) + wire)


class _DatagramServer(socketserver.ThreadingUDPServer):
    daemon_threads = True


class _StreamServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = socket.SOMAXCONN


def _end(failure: threading.ExceptHookArgs) -> None:
    """End the process with a thread that failed: no answers are better than old ones."""
    sys.__excepthook__(failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback)
    os._exit(1)


def main() -> None:
    threading.excepthook = _end
    config.load_kube_config(sys.argv[1])
    _Datagram.objects = _Stream.objects = Objects()
    streams = _StreamServer(("", 53), _Stream)
    threading.Thread(target=streams.serve_forever, daemon=True).start()
    _DatagramServer(("", 53), _Datagram).serve_forever()


if __name__ == "__main__":
    main()

"""Malformed and hostile manifests, each with the one thing that must be said about it.

`write` makes a directory of them, with good ones among them.
"""

import json
import os
import string
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.core.directory_rig import NODE, endpoint_slice, endpoints, node, service, service_cidr, text

Json = dict[str, Any]


class Hostile(NamedTuple):
    """A file that holds one bad thing."""

    file: str
    content: bytes
    complaint: str
    """The complaint about it, or its beginning."""


class Refused(NamedTuple):
    """An object of which nothing can be used."""

    value: Any
    complaint: str


GOOD: dict[str, list[Json]] = {
    "000-first.yaml": [service("first", "10.96.1.1"), endpoint_slice("first", "10.1.0.1", "10.1.0.2")],
    "mmm-middle.json": [{"apiVersion": "v1", "kind": "List", "items": [
        service("middle", "10.96.1.2"), "not an object", endpoint_slice("middle", "10.1.0.3")]}],
    "zzz-last.yml": [service("last", "10.96.1.3"), endpoints("last", "10.1.0.4"), node(NODE, "zone1")],
}
GOOD_COMPLAINTS = ["object mmm-middle.json items[1]: expected object, got str"]
GOOD_ENDPOINTS = {
    "first": {"10.1.0.1", "10.1.0.2"}, "middle": {"10.1.0.3"}, "last": {"10.1.0.4"}, "partly": {"10.1.0.5"},
}


def changed(value: Json, path: str, new: object) -> Json:
    """*value* with the field at *path* (keys and indexes, separated by dots) replaced."""
    copy: Json = json.loads(json.dumps(value))
    place: Any = copy
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        place = place[part]
    place[last] = new
    return copy


def bad_services() -> Iterator[Refused]:
    """Services of which nothing remains."""
    plain = service("bad")

    def one(path: str, new: object, complaint: str) -> Refused:
        return Refused(changed(plain, path, new), f"Service default/bad: {complaint}")

    yield one("spec.clusterIP", "10.96.300.1", "spec.clusterIP: '10.96.300.1' is not an IP address")
    yield one("spec.clusterIP", "10.96.0.1 ; reboot", "spec.clusterIP: '10.96.0.1 ; reboot' is not an IP")
    yield one("spec.clusterIP", "10.96.0.1\n", "spec.clusterIP: '10.96.0.1\\n' is not an IP address")
    yield one("spec.clusterIP", "１０.９６.０.１", "spec.clusterIP: '\\uff11\\uff10")
    yield one("spec.clusterIP", "9" * 1_000_000, "spec.clusterIP: '99999")
    yield one("spec.clusterIP", "127.0.0.1", "spec.clusterIP: 127.0.0.1 is an unspecified, loopback")
    yield one("spec.clusterIP", "0.0.0.0", "spec.clusterIP: 0.0.0.0 is an unspecified, loopback")
    yield one("spec.clusterIP", "ff02::1", "spec.clusterIP: ff02::1 is an unspecified, loopback, multicast")
    yield one("spec.clusterIP", "fe80::1%eth0", "spec.clusterIP: 'fe80::1%eth0' is not an IP address")
    yield one("spec.clusterIP", 177209345, "spec.clusterIP: expected str, got int")
    yield one("spec.clusterIP", {"ip": "10.96.0.1"}, "spec.clusterIP: expected str, got object")
    yield one("spec.clusterIPs", "10.96.0.1", "spec.clusterIPs: expected array, got str")
    yield one("spec.clusterIPs", ["10.96.0.1", "x"], "spec.clusterIPs[1]: 'x' is not an IP address")
    yield one("spec.clusterIPs", ["10.96.0.9"], "spec.clusterIPs[0]: '10.96.0.9' differs from spec")
    yield one("spec.ipFamilies", ["IPv6"], "spec.clusterIP: 10.96.0.1 is not an IPv6 address")
    yield one("spec.ipFamilies", ["IPv4", "IPX"], "spec.ipFamilies[1]: 'IPX' is not an IP family")
    yield one("spec.type", "Potato", "spec.type: 'Potato' is not a type of Service")
    yield one("spec.ports.0.port", 0, "spec.ports[0].port: 0 is not a port")
    yield one("spec.ports.0.port", 65536, "spec.ports[0].port: 65536 is not a port")
    yield one("spec.ports.0.port", -80, "spec.ports[0].port: -80 is not a port")
    yield one("spec.ports.0.port", 10**25, "spec.ports[0].port: ")
    yield one("spec.ports.0.port", "80; drop", "spec.ports[0].port: expected int, got str")
    yield one("spec.ports.0.port", 8.5, "spec.ports[0].port: expected int, got float")
    yield one("spec.ports.0.port", True, "spec.ports[0].port: expected int, got bool")
    yield one("spec.ports.0.port", None, "spec.ports[0].port: is missing")
    yield one("spec.ports.0.nodePort", 70000, "spec.ports[0].nodePort: 70000 is not a port")
    yield one("spec.ports.0.protocol", "SMTP", "spec.ports[0].protocol: 'SMTP' is not TCP, UDP or SCTP")
    yield one("spec.ports.0.name", 'a" accept', "spec.ports[0].name: 'a\" accept' is not a DNS label")
    yield one("spec.ports", {"port": 80}, "spec.ports: expected array, got object")
    yield one("spec.ports", [[80]], "spec.ports[0]: expected object, got array")
    yield one("spec", [], "spec: expected object, got array")
    yield one("spec.externalIPs", "198.51.100.1", "spec.externalIPs: expected array, got str")
    yield one("spec.loadBalancerSourceRanges", {}, "spec.loadBalancerSourceRanges: expected array")
    yield one("spec.sessionAffinityConfig", "x", "spec.sessionAffinityConfig: expected object, got str")
    yield one("status", "fine", "status: expected object, got str")
    yield one("metadata.labels", ["a"], "metadata.labels: expected object, got array")
    yield one("metadata.creationTimestamp", 5, "metadata.creationTimestamp: expected str, got int")


def bad_names() -> Iterator[Refused]:
    """Objects whose names are to reach neither kernel nor logs."""
    for name in ('web"; flush ruleset; "', "web\nnext", "web\x00", "../../etc/passwd", "$(reboot)", "WEB",
                 "wéb", "w" * 64, "-", "", " ", "web\u202e"):
        value = changed(service("bad"), "metadata.name", name)
        yield Refused(value, "Service ")
    yield Refused(changed(service("bad"), "metadata.name", 5), "Service {file}: metadata.name: expected str")
    yield Refused(changed(service("bad"), "metadata", "bad"), "Service {file}: metadata: expected object")
    yield Refused(changed(service("bad"), "metadata.namespace", 'a"b'), "Service ")
    yield Refused(changed(service("bad"), "metadata.namespace", ["a"]), "Service ?/bad: metadata.namespace")


def bad_slices() -> Iterator[Refused]:
    """EndpointSlices and Endpoints of which nothing remains."""
    plain = endpoint_slice("first", "10.1.0.66", name="bad")

    def one(path: str, new: object, complaint: str) -> Refused:
        return Refused(changed(plain, path, new), f"EndpointSlice default/bad: {complaint}")

    yield one("addressType", "IPv5", "addressType: 'IPv5' is not IPv4, IPv6 or FQDN")
    yield one("addressType", None, "addressType: is missing")
    yield one("endpoints", {}, "endpoints: expected array, got object")
    yield one("endpoints", [{"addresses": ["10.1.0.66"]}] * 1001, "endpoints: 1001 of them")
    yield one("endpoints", [{}] * 400_000, "endpoints: 400000 of them")
    yield one("endpoints", [{"addresses": ["10.1.0.66"]}] * 120_000, "is larger than 3 MiB")
    yield one("endpoints.0.addresses", "10.1.0.66", "endpoints[0].addresses: expected array, got str")
    yield one("endpoints.0.addresses", [10], "endpoints[0].addresses[0]: expected str, got int")
    yield one("endpoints.0.addresses", [["10.1.0.66"]], "endpoints[0].addresses[0]: expected str, got array")
    yield one("endpoints.0.conditions", {"ready": "yes"}, "endpoints[0].conditions.ready: expected bool")
    yield one("endpoints.0.hints", {"forZones": "z"}, "endpoints[0].hints.forZones: expected array")
    yield one("endpoints.0.nodeName", {}, "endpoints[0].nodeName: expected str, got object")
    yield one("ports", [{"port": n} for n in range(1, 20002)], "ports: 20001 of them")
    yield one("ports.0.port", "http", "ports[0].port: expected int, got str")
    yield one("metadata.labels", {"kubernetes.io/service-name": "first\n"},
              "metadata.labels[kubernetes.io/service-name]: 'first\\n' is not a DNS label")
    yield one("metadata.labels", {"kubernetes.io/service-name": ["first"]},
              "metadata.labels.kubernetes.io/service-name: expected str, got array")
    yield Refused(changed(endpoints("bad"), "subsets.0.addresses", [{"ip": "10.1.0.66"}] * 5000),
                  "Endpoints default/bad: subsets[0]: 5000 addresses; at most 1000 are mirrored")
    yield Refused(changed(endpoints("bad"), "subsets", "none"), "Endpoints default/bad: subsets: expected")
    yield Refused(changed(node("bad"), "metadata.name", "node\n1"), "Node 'node\\n1': metadata.name: ")
    yield Refused(changed(node("bad"), "spec", 5), "Node bad: spec: expected object, got int")
    yield Refused(changed(service_cidr("bad"), "spec.cidrs", "all"), "ServiceCIDR bad: spec.cidrs: expected")


def partly_bad() -> Iterator[Refused]:
    """Objects of which the good part is used."""
    plain = service("partly", "10.96.1.4")

    def one(path: str, new: object, complaint: str) -> Refused:
        return Refused(changed(plain, path, new), f"Service default/partly: {complaint}")

    piece = endpoint_slice("partly", "10.1.0.5", name="partly")
    yield Refused(
        changed(piece, "endpoints", [{"addresses": ["not-an-address"]}, {"addresses": ["10.1.0.5"]}]),
        "EndpointSlice default/partly: endpoints[0].addresses[0]: 'not-an-address' is not a usable")
    yield Refused(
        changed(piece, "ports", [{"port": 8080}, {"name": "big", "port": 70000}]) | {"metadata": {
            "name": "partly-2", "labels": {"kubernetes.io/service-name": "partly"}}},
        "EndpointSlice default/partly-2: ports[1].port: 70000 is not a port (1 to 65535)")
    yield Refused(
        changed(service_cidr("partly"), "spec.cidrs", ["10.96.0.0/12", "10.0.0.0/99"]),
        "ServiceCIDR partly: spec.cidrs[1]: '10.0.0.0/99' is not a CIDR")
    yield one("spec.externalIPs", ["junk"], "spec.externalIPs[0]: 'junk' is not an IP address")


def bad_documents() -> Iterator[Hostile]:
    """Documents that are no objects."""
    for i, (content, complaint) in enumerate([
        ("hello", "expected object, got str"),
        ("5", "expected object, got int"),
        ("[[[]]]", "expected object, got array"),
        ("a: b", "kind: is missing"),
        ("kind: {a: b}\napiVersion: v1", "kind: is missing"),
    ]):
        yield Hostile(f"document-{i}.yaml", content.encode(), f"object document-{i}.yaml: {complaint}")
    yield Hostile("no-version.yaml", b"kind: Service", "Service no-version.yaml: apiVersion: is missing")
    yield Hostile(
        "version.yaml", b"kind: Service\napiVersion: v2", "Service version.yaml: apiVersion: 'v2' is not v1")
    yield Hostile("items.yaml", b"kind: List\napiVersion: v1\nitems: 7", "List items.yaml: items: is not")
    nested: Json = service("bad")
    for _ in range(100):
        nested = {"apiVersion": "v1", "kind": "List", "items": [nested]}
    yield Hostile("lists.json", json.dumps(nested).encode(), "List lists.json items[0]")


def bad_files() -> Iterator[Hostile]:
    """Files that are not even documents."""
    letters = string.ascii_lowercase[:12]
    bomb = "a: &a [lol]\n" + "".join(
        f"{this}: &{this} [{', '.join([f'*{before}'] * 10)}]\n" for before, this in pairwise(letters))
    wide = ", ".join(f"k{i}: v" for i in range(1000))
    for name, content, problem in (
        ("empty.yaml", b"", "is empty"),
        ("blank.json", b"  \n\n", "is empty"),
        ("elf.yaml", b"\x7fELF\x02\x01\x01" + bytes(range(256)), "is not YAML"),
        ("nul.yaml", b"kind: Service\x00\n", "is not YAML"),
        ("utf8.yaml", b"kind: \xff\xfe\n", "is not YAML"),
        ("truncated.yaml", b"kind: Service\nspec: {ports: [", "is not YAML"),
        ("truncated.json", b'{"kind": "Service", "spec": {', "is not a JSON object: input data was"),
        ("trailing.json", json.dumps(service("bad")).encode() * 2, "is not a JSON object: JSON is malformed"),
        ("nan.json", b'{"kind": "Service", "spec": {"ports": [{"port": NaN}]}}', "is not a JSON object"),
        ("array.json", b"[1, 2]", "is not a JSON object: expected object, got array"),
        ("deep.json", b'{"a": ' * 100_000, "is not a JSON object: nested too deeply"),
        ("deep.yaml", b"a: " + b"[" * 100_000, "is not YAML: nested too deeply"),
        ("dashes.yaml", b"- " * 100_000, "is not YAML: nested too deeply"),
        ("bomb.yaml", bomb.encode(), "is not YAML: aliases stand for more than"),
        ("merge.yaml", f"a: &a {{{wide}}}\nb: {{<<: [{', '.join(['*a'] * 1000)}]}}".encode(),
         "is not YAML: aliases stand for more than"),
        ("circle.yaml", b"&a [*a]", "is not YAML: alias 'a' names nothing complete"),
        ("python.yaml", b"!!python/object/apply:os.system ['reboot']", "is not YAML: tag "),
        ("huge.yaml", b"#" * ((16 << 20) + 1), "is larger than 16 MiB"),
        ("million.json", json.dumps(changed(
            endpoint_slice("first", name="bad"), "endpoints",
            [{"addresses": ["10.1.0.66"]}] * 1_000_000)).encode(), "is larger than 16 MiB"),
    ):
        yield Hostile(name, content, f"file {name}: {problem}")


def all_hostile() -> list[Hostile]:
    """Every file, one bad thing in each."""
    files = [*bad_files(), *bad_documents()]
    for kind, objects in (
        ("service", bad_services()), ("name", bad_names()), ("slice", bad_slices()), ("partly", partly_bad()),
    ):
        for i, refused in enumerate(objects):
            # Each bad Service and slice by another name, or they would be rivals for it.
            content = json.dumps(refused.value).replace('"bad"', f'"bad-{kind}-{i}"')
            name = f"{kind}-{i}.json" if i % 2 else f"{kind}-{i}.yaml"
            complaint = refused.complaint.replace("{file}", name)
            for end in (":", " "):
                complaint = complaint.replace(f"bad{end}", f"bad-{kind}-{i}{end}")
            files.append(Hostile(name, (content if i % 2 else f"---\n{content}\n").encode(), complaint))
    return files


def write(directory: Path) -> list[str]:
    """Fill *directory*; returns what must be said about it, each exactly once."""
    complaints = list(GOOD_COMPLAINTS)
    for name, objects in GOOD.items():
        content = json.dumps(objects[0]) if name.endswith(".json") else text(*objects)
        (directory / name).write_text(content)
    for hostile in all_hostile():
        (directory / hostile.file).write_bytes(hostile.content)
        complaints.append(hostile.complaint)
    os.mkfifo(directory / "pipe.yaml")
    complaints.append("file pipe.yaml: is not a regular file")
    (directory / "zero.yaml").symlink_to("/dev/zero")
    complaints.append("file zero.yaml: is not a regular file")
    (directory / "nowhere.json").symlink_to("nothing-there")
    complaints.append("file nowhere.json: is a symbolic link to nothing")
    (directory / "loop.yaml").symlink_to("loop.yaml")
    complaints.append("file loop.yaml: can't be read: ")
    return complaints

"""Answers of many nodes, summed up."""

from kproxy_core.fleet.answers import Diff, Difference, Frontend, Top, Traffic, Verified
from kproxy_core.fleet.summary import failing_frontends, named, shared_differences, total_traffic


def difference(frontend: str, text: str = "is dropped") -> Difference:
    return Difference("frontend", frontend, "shop/web", text)


def test_differences_of_the_fewest_nodes_come_first() -> None:
    found = shared_differences({
        "a": Diff("nftables", [difference("10.96.0.1:80"), difference("10.96.0.2:80")]),
        "b": Diff("iptables", [difference("10.96.0.1:80")]),
        "c": Diff("nftables", [difference("10.96.0.1:80", "is refused"), difference("10.96.0.1:80")]),
        "d": Diff("nftables", []),
    })
    assert [(each.difference.frontend, each.difference.difference, each.nodes) for each in found] == [
        ("10.96.0.1:80", "is refused", ["c"]),
        ("10.96.0.2:80", "is dropped", ["a"]),
        ("10.96.0.1:80", "is dropped", ["a", "b", "c"]),
    ]


def test_frontends_that_fail_from_the_fewest_nodes_come_first() -> None:
    def verified(**problems: list[str]) -> Verified:
        return Verified([Frontend(name, "shop/web", texts) for name, texts in problems.items()])

    found = failing_frontends({
        "a": verified(x=["hung"], y=[]), "b": verified(x=["hung"], y=["refused"]), "c": verified(x=[], y=[]),
    })
    assert [(each.frontend, each.problems) for each in found] == [
        ("y", {"b": ["refused"]}), ("x", {"a": ["hung"], "b": ["hung"]})]


def traffic(port: str, rate: float, *problems: str, protocol: str = "TCP", endpoints: int = 2) -> Traffic:
    return Traffic(port, protocol, endpoints, 10, 1, 2, rate, 100, 1000, problems)


def test_traffic_is_summed_for_each_service_port() -> None:
    found = total_traffic({
        "a": Top([traffic("shop/web", 1.0), traffic("dns", 4.0, protocol="UDP")], 2, counted=True),
        "b": Top([
            traffic("shop/web", 2.5, "no endpoints", endpoints=0), traffic("dns", 0.0)], 2, counted=True),
        "c": Top([], 0, counted=False),
    })
    assert [(total.service_port, total.protocol, total.rate) for total in found] == [
        ("dns", "UDP", 4.0), ("shop/web", "TCP", 3.5), ("dns", "TCP", 0.0)]
    web = found[1]
    assert (web.endpoints, web.forwarded, web.rejected, web.failed, web.bytes) == (2, 20, 2, 4, 2200)
    assert web.problems == {"no endpoints": ["b"]}


def test_many_nodes_are_named_by_the_first_few() -> None:
    assert named(["a"]) == "a"
    assert named(["a", "b", "c"]) == "a, b, c"
    assert named([*"abcdefg"]) == "a, b, c and 4 more"

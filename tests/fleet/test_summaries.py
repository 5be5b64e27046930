"""The commands over all nodes, with nodes that answer what is wrong with them."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.fleet.canned import STATUS, Canned


def lines(text: str) -> list[str]:
    """Return the lines with single blanks."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_nodes_with_problems_come_first(canned: Canned) -> None:
    canned.answer("a", STATUS)
    canned.answer("b", {**STATUS, "well": False, "problems": ["IPv4: busy", "IPv6: busy"], "lag": 90.0,
                        "configured": "iptables"}, 1)
    canned.answer("c", {**STATUS, "findings": ["mtu", "clock"]})
    done = canned.kubectl("status")
    assert done.return_value == 1
    assert lines(done.output) == [
        "NODE STATE FOR MODE VERSION LAST SYNC LAG FOREIGN CHANGES DOCTOR PROBLEMS",
        "b not well 2 h nftables, not iptables 0.2.0 (0123456789ab) 10 s ago 90 s 0 IPv4: busy; IPv6: busy",
        "a well 2 h nftables 0.2.0 (0123456789ab) 10 s ago 0",
        "c well 2 h nftables 0.2.0 (0123456789ab) 10 s ago 0 2 findings",
        "2 of 3 nodes are well",
    ]
    assert canned.asked == ["kproxy status -o json"] * 3


def test_nodes_are_chosen_by_their_labels(canned: Canned) -> None:
    canned.node("a", "exit 1", pool="blue")
    canned.node("b", "exit 1", pool="green")
    found = json.loads(canned.kubectl("status", "--nodes", "pool in (green)", "-o", "json").output)
    assert [node["node"] for node in found["nodes"]] == ["b"]
    assert str(canned.kubectl("status", "--nodes", "pool=red").exception) == (
        "no node has the labels pool=red")


def difference(kind: str = "frontend") -> dict[str, object]:
    return {"kind": kind, "frontend": "10.96.0.10:80/TCP", "service_port": "shop/web", "senders": [],
            "difference": "is dropped"}


@pytest.mark.parametrize(
    ("differences", "status"),
    [([], 0), ([difference("unclear")], 1), ([difference(), difference("unclear")], 1)],
)
def test_differences_are_listed_with_their_nodes(
    canned: Canned, differences: list[dict[str, object]], status: int
) -> None:
    canned.answer("a", {"mode": "nftables", "differences": []})
    canned.answer("b", {"mode": "nftables", "differences": differences}, status)
    done = canned.kubectl("diff")
    assert done.return_value == status
    rows = lines(done.output)
    assert rows[-1] == f"{1 if differences else 2} of 2 nodes do what their plans say"
    if differences:
        assert rows[1] == "1 b 10.96.0.10:80/TCP shop/web is dropped"


def test_a_node_that_does_not_answer_fails_every_command(canned: Canned) -> None:
    canned.node("a", "echo 'Error: broken' >&2; exit 1")
    for command in (("diff",), ("verify", "--traffic"), ("top",)):
        done = canned.kubectl(*command)
        assert done.return_value == 1
        assert lines(done.output)[:2] == ["NODE NO ANSWER", "a broken"]


def test_failures_are_a_matrix(canned: Canned) -> None:
    def verified(*failing: str) -> dict[str, object]:
        return {"frontends": [
            {"frontend": name, "service_port": f"shop/{name}", "problems": ["hung"] * (name in failing)}
            for name in ("x", "y", "z")]}

    for number in range(12):
        canned.answer(f"n{number:02}", verified("x", *["y"] * (number == 7)), 1)
    canned.answer("n12", verified())
    done = canned.kubectl("verify", "--traffic", "--service=shop/web", "--rate=7")
    assert done.return_value == 1
    assert set(canned.asked) == {
        "kproxy verify --traffic --service=shop/web --rate=7.0 --connections=10 -o json"}
    assert lines(done.output) == [
        "FRONTEND SERVICE PORT n07 n00 n01 n02 n03 n04 n05 n06 4 OTHERS TOTAL",
        "y shop/y x . . . . . . . 0 1",
        "x shop/x x x x x x x x x 4 12",
        "TOTAL 2 1 1 1 1 1 1 1 4 13",
        "",
        "y from n07: hung",
        "x from n00, n01, n02 and 9 more: hung",
        "26 of 39 pairs of node and frontend do what the plans say, "
        "from the node itself: not tried from pods and from outside",
    ]


def test_reports_are_collected_in_a_tar_or_a_directory(canned: Canned, tmp_path: Path) -> None:
    canned.node("a", r"printf '\037\213\000binary'")
    canned.node("b", "echo no archive")
    done = canned.kubectl("report", str(tmp_path / "all"), "-o", "json")
    assert done.return_value == 1
    assert json.loads(done.output) == {
        "file": str(tmp_path / "all"), "nodes": ["a"], "unreached": {"b": "its answer is no archive"}}
    assert canned.kubectl("report", str(tmp_path / "all.tar")).return_value == 1
    expected = {"a.tar.gz": b"\x1f\x8b\x00binary", "problems.txt": b"b: its answer is no archive\n"}
    assert {path.name: path.read_bytes() for path in (tmp_path / "all").iterdir()} == expected
    with tarfile.open(tmp_path / "all.tar") as archive:
        found = {member.name: archive.extractfile(member) for member in archive}
        assert {name: file.read() for name, file in found.items() if file is not None} == {
            f"all/{name}": data for name, data in expected.items()}
    assert "File exists" in str(canned.kubectl("report", str(tmp_path / "all.tar")).exception)
